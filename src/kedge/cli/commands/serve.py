"""`kedge serve`: the store over HTTP."""

from __future__ import annotations

from types import ModuleType

import click

from kedge.cli.command import Number, Session, store_command


@store_command("serve", json_keys="nothing; it logs to stderr: JSON lines, or text on a terminal.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7420, show_default=True, help="The port to listen on.")
@click.option("--workers", type=Number(1), default=1, show_default=True, help="The number of worker processes.")
@click.option(
    "--path-prefix", "root_path", default="", metavar="/PATH", help="The path below which a reverse proxy serves it."
)
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name under which it may be called; repeatable.",
)
@click.option(
    "--trust-proxy",
    "proxies",
    default="127.0.0.1",
    metavar="IP[,IP]",
    show_default=True,
    help="Trust the X-Forwarded-* headers of these proxies.",
)
@click.option(
    "--drain",
    "drain_s",
    type=Number(1),
    default=30,
    metavar="S",
    show_default=True,
    help="On SIGTERM, seconds to finish requests in progress.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Log messages of this level and above.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    help="How to log; auto: text on a terminal, else JSON lines.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="Serve HTTPS with this certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="The certificate's key, if it is in another file.")
@click.option(
    "--unix-socket", type=click.Path(dir_okay=False), help="Listen on this Unix socket instead of a host and port."
)
@click.option(
    "--max-body", type=Number(1), default=1024, metavar="MIB", show_default=True, help="The largest save, in MiB."
)
@click.option(
    "--max-json", type=Number(1), default=64, metavar="MIB", show_default=True, help="The largest save as JSON, in MiB."
)
@click.option("--allow-private-webhooks", is_flag=True, help="Let webhooks call private addresses, and plain HTTP.")
def serve_command(
    session: Session, workers: int, root_path: str, max_body: int, max_json: int, **options: object
) -> None:
    """Serve the store over HTTP: a web page for people, an API for programs.

    Without tokens (kedge token create), it accepts only connections from this machine. It ends with 143 on SIGTERM and
    130 on Ctrl-C; with several workers, with 0.
    """
    process = _process()
    place = _place(session, workers)
    session.export_key()
    process.serve(
        process.Settings(
            store=place,
            namespace=session.namespace,
            workers=workers,
            root_path=root_path.rstrip("/"),
            body_bytes=max_body << 20,
            json_bytes=max_json << 20,
            **options,
        )
    )


def _process() -> ModuleType:
    from kedge.errors import Validation, install_hint

    try:
        from kedge.server import process
    except ModuleNotFoundError as error:
        raise Validation(f"serving needs {error.name}", hint=install_hint("server")) from error
    return process


def _place(session: Session, workers: int) -> str:
    from kedge.errors import Validation
    from kedge.urls import default_url, reachable

    place = reachable(session.store or default_url())
    if place.startswith("memory:") and workers > 1:
        raise Validation("several workers cannot share a store in memory", hint="use one, or a directory")
    return place
