"""Addresses: the one place where host and port become text, and text becomes host and port. No torch.

    text ──parse_endpoint──▶ Endpoint(host, port) ──str──▶ "127.0.0.1:80", "[::1]:80", "[fe80::1%eth0]:80", "node-3:80"

A host is kept without brackets; brackets exist in text only. Listening sockets are bound by `listen` and handed on
open, so that nobody can take the port between a probe and its use. A wildcard is never bound and never advertised:
an address that means "every interface" tells a peer nothing about where to connect.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from offbeat.errors import ConfigError

_NAME = re.compile(r"^(?!-)[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?$")


@dataclass(frozen=True)
class Endpoint:
    """A host (IPv4, IPv6 with or without scope, or a name; never bracketed) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host(text: str) -> str:
    """A host without brackets: IPv4, IPv6 (`::1`, `[::1]`, `fe80::1%eth0`) or a name. ConfigError otherwise."""
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ConfigError(f"address {text!r}: brackets are for IPv6 only; write {host or '::1'!r} without them.")
    if not host:
        raise ConfigError(f"address {text!r}: no host; give an IPv4 or IPv6 address or a name.")
    if ":" in host:
        address, percent, scope = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise ConfigError(f"address {text!r}: not an IPv6 address, and no other host has a colon.") from None
        if percent and not scope:
            raise ConfigError(f"address {text!r}: nothing after %; name the interface, e.g. fe80::1%eth0.")
        return host
    if host != "*" and not _NAME.match(host):
        raise ConfigError(f"address {text!r}: not an IPv4 address, IPv6 address or host name.")
    return host


def parse_endpoint(text: str) -> Endpoint:
    """`host:port`, with IPv6 in brackets. ConfigError names what is wrong: port missing, no number, no brackets."""
    match = re.match(r"^(\[[^\]]*\]|[^:\[\]]*):([0-9]+)$", text.strip())
    if match is None:
        if text.count(":") > 1 and "[" not in text:
            raise ConfigError(f"endpoint {text!r}: put the IPv6 address in brackets, e.g. [::1]:29500.")
        raise ConfigError(f"endpoint {text!r}: write host:port, e.g. 127.0.0.1:29500 or [::1]:29500.")
    port = int(match.group(2))
    if port > 65535:
        raise ConfigError(f"endpoint {text!r}: port {port} is above 65535.")
    return Endpoint(parse_host(match.group(1)), port)


def is_wildcard(host: str) -> bool:
    """True for an address that means every interface: `0.0.0.0`, `::`, `*`, and other spellings of them."""
    if host in ("*", "", "0"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def listen(host: str, *, backlog: int = 128) -> tuple[socket.socket, Endpoint]:
    """Bind a listening TCP socket on a free port of this one address, and say where it is (numeric host).

    A name is resolved and its addresses are tried in the resolver's order. The caller owns the socket.
    Raises ConfigError for a wildcard, a name that does not resolve, or an address that is not this machine's.
    """
    host = parse_host(host)
    if is_wildcard(host):
        raise ConfigError(
            f"address {host!r} is a wildcard: peers could not know where to connect. Give the address of the "
            "interface to use, e.g. 127.0.0.1 on one machine."
        )
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"address {host!r}: cannot be resolved ({error}); give an address of this machine."
        ) from error
    reasons: list[str] = []
    for family, kind, protocol, _, address in found:
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        if is_wildcard(str(address[0])):
            raise ConfigError(f"address {host!r} resolves to the wildcard {address[0]}; give one interface's address.")
        bound = socket.socket(family, kind, protocol)
        try:
            bound.bind(address)
            bound.listen(backlog)
        except OSError as error:
            bound.close()
            reasons.append(f"{address[0]}: {error.strerror or error}")
            continue
        return bound, Endpoint(_numeric(bound.getsockname()), bound.getsockname()[1])
    raise ConfigError(f"address {host!r} cannot be bound here ({'; '.join(reasons)}); give an address of this machine.")


def source_address(peer: Endpoint) -> str:
    """The numeric address of this machine that reaches `peer`: the source address of the route to it. Sends nothing."""
    try:
        found = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"address {peer.host!r}: cannot be resolved ({error}).") from error
    last: OSError | None = None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                last = error
                continue
            return _numeric(probe.getsockname())
    raise ConfigError(f"endpoint {peer}: this machine has no route to it ({last}).")


def _numeric(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Host text of a socket address; a scope id becomes `%interface`."""
    host = str(address[0]).partition("%")[0]
    scope = address[3] if len(address) == 4 else 0
    return f"{host}%{socket.if_indextoname(scope)}" if scope else host
