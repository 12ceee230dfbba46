"""Serves S3 on loopback: moto, single-threaded, because otherwise its conditional PUT is not atomic.

    python -m examples.s3_server --port PORT --ready-file PATH

Everything is in memory and gone with the process. `examples.processes` starts it as a child process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug import serving


class _QuietHandler(serving.WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Do nothing: successes are not worth a line; errors still are."""


def main() -> None:
    parser = argparse.ArgumentParser(description="An S3 server on loopback, in memory.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--ready-file", type=Path, help="is written when requests are accepted")
    arguments = parser.parse_args()
    application = DomainDispatcherApplication(create_backend_app)
    server = serving.make_server(
        "127.0.0.1", arguments.port, application, threaded=False, request_handler=_QuietHandler
    )
    if arguments.ready_file is not None:
        temporary = arguments.ready_file.with_suffix(".new")
        temporary.write_text(str(server.port))
        temporary.replace(arguments.ready_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
