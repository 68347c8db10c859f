"""A small typed RPC between the controller and the processes that it started.

    controller (asyncio)                            worker process
    client.Hub ─ ROUTER ◀── ipc, or tcp + CURVE ──▶ DEALER ─ connection (I/O thread) ─ server.serve (main thread)
    worker.Worker   calls, progress, death          lifeline   invitation and death pipe on stdin
    process.Child   start, exit, log, end           failure    exceptions as text
    guard           ends what a dead controller left behind

    messages   arguments and results of every service      wire        what hub and worker say besides calls
    codec      envelope and array frames, all checks       transport   sockets, keys, allow-list
    runtime    the private folder of the sockets

A message is data: nothing in it is unpickled, imported or run; a method is a name that the worker registered. Every
call has a deadline. Workers never call the controller. Arrays that arrive are read-only.

Start workers with `client.Hub`, write one with `server.serve`; the other modules serve these two.
"""
