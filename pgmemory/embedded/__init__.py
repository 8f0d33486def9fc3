"""A PostgreSQL of one's own in a folder, for development, the demo and tests.

Owns: finding the binaries, making the data, starting, sharing and stopping the server.
Must not know: what is stored in it, the schema, any driver.

The folder holds::

    pgdata       the data and the server's log; a link where the server may not enter the folder (see LocalServer)
    start.lock   held by whoever is starting or stopping the server
    users.lock   held, shared, by each process that uses the server
    server.lock  held by the server's own processes, which inherit it; its text names the folder of the socket

The kernel drops a lock when the last process that holds it is gone, whatever ended it. So a lock never goes stale as
a pid file does, whose number may be another process's after a reboot and means nothing in another container.
"""

from pgmemory.embedded.errors import LocalServerError
from pgmemory.embedded.server import LocalServer

__all__ = ["LocalServer", "LocalServerError"]
