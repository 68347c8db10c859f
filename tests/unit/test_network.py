"""Addresses as text and back, listening sockets that are never a wildcard."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.network import Endpoint, is_wildcard, listen, parse_endpoint, parse_host, source_address

HOSTS = {
    "127.0.0.1": "127.0.0.1",
    "::1": "::1",
    "[::1]": "::1",
    "fe80::1%eth0": "fe80::1%eth0",
    "[fe80::1%eth0]": "fe80::1%eth0",
    "2001:db8:0:0:1:2:3:4": "2001:db8:0:0:1:2:3:4",
    "::ffff:10.0.0.1": "::ffff:10.0.0.1",
    "localhost": "localhost",
    "node-3.cluster.local": "node-3.cluster.local",
}


@pytest.mark.parametrize(("text", "host"), HOSTS.items())
def test_every_kind_of_host_makes_a_round_trip_B010(text: str, host: str) -> None:
    assert parse_host(text) == host
    endpoint = Endpoint(parse_host(text), 29500)
    assert parse_endpoint(str(endpoint)) == endpoint
    assert str(endpoint).endswith("]:29500" if ":" in host else f"{host}:29500")


@given(st.ip_addresses(), st.integers(0, 65535))
def test_any_address_and_port_make_a_round_trip_B010(address: object, port: int) -> None:
    endpoint = Endpoint(str(address), port)
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("::1:29500", "in brackets"),
        ("127.0.0.1", "host:port"),
        ("node:", "host:port"),
        ("node:http", "host:port"),
        ("node:70000", "above 65535"),
        (":80", "no host"),
        ("[]:80", "brackets are for IPv6"),
        ("[10.0.0.1]:80", "brackets are for IPv6"),
        ("[fe80::1%]:80", "name the interface"),
        ("[1:2:3]:80", "not an IPv6 address"),
        ("a b:80", "host name"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_the_rule(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_endpoint(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"])
def test_a_wildcard_is_known_in_every_spelling_and_never_bound_B061(host: str) -> None:
    assert is_wildcard(host)
    with pytest.raises(ConfigError, match="wildcard"):
        listen(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "fe80::1%eth0"])
def test_one_interface_is_no_wildcard(host: str) -> None:
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_a_listener_is_bound_before_its_address_is_known_B053(host: str) -> None:
    bound, endpoint = listen(host)
    with bound:
        assert endpoint.port > 0
        assert not is_wildcard(endpoint.host)
        with socket.create_connection((endpoint.host, endpoint.port), timeout=5):
            pass
        assert source_address(endpoint) == endpoint.host
        with pytest.raises(OSError), socket.socket(bound.family) as other:
            other.bind(bound.getsockname())


def test_a_scoped_address_is_bound_with_its_scope_B010() -> None:
    scoped = _link_local()
    if scoped is None:
        pytest.skip("no link-local IPv6 address on this machine")
    bound, endpoint = listen(scoped)
    with bound:
        assert endpoint.host == scoped
        with socket.create_connection((endpoint.host, endpoint.port), timeout=5):
            pass


def test_an_address_of_another_machine_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77.*address of this machine"):
        listen("192.0.2.77")


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        listen("no-such-host.invalid")


def _link_local() -> str | None:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [row.split() for row in table]
    except OSError:
        return None
    for digits, _, _, scope, _, interface in rows:
        if scope == "20":
            packed = bytes.fromhex(digits)
            return f"{socket.inet_ntop(socket.AF_INET6, packed)}%{interface}"
    return None
