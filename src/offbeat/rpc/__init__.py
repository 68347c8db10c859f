"""A small typed RPC between the controller and the processes that it started."""
