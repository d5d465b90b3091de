"""`kedge serve`: the store over HTTP."""

from __future__ import annotations

import click

from kedge.cli.command import Number, Session, store_command


@store_command("serve", json_keys="nothing: it logs JSON lines on stderr, or words where that is a terminal.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option("--port", type=click.IntRange(0, 65535), default=7420, show_default=True, help="Listen on this port.")
@click.option("--workers", type=Number(1), default=1, show_default=True, help="Number of processes.")
@click.option("--path-prefix", default="", metavar="/PATH", help="The prefix that a proxy in front removes.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Allow this host name; repeatable.")
@click.option(
    "--trust-proxy", default="127.0.0.1", metavar="IP[,IP]", show_default=True, help="Trust headers from these proxies."
)
@click.option("--drain", type=Number(1), default=30, metavar="S", show_default=True, help="Seconds a stop may take.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="The least to log."
)
def serve_command(
    session: Session,
    host: str,
    port: int,
    workers: int,
    path_prefix: str,
    hosts: tuple[str, ...],
    trust_proxy: str,
    drain: int,
    log_level: str,
) -> None:
    """Serve the store over HTTP: a web page for people, an API for programs.

    It listens on this machine only, unless the store has tokens (kedge token create).
    """
    from kedge.errors import Validation, install_hint
    from kedge.manager import default_url
    from kedge.urls import reachable

    try:
        from kedge.server.process import Settings, serve
    except ModuleNotFoundError as error:
        raise Validation(f"serving needs {error.name}", hint=install_hint("server")) from error

    place = reachable(session.store or default_url())
    if place.startswith("memory:") and workers > 1:
        raise Validation("several workers cannot share a store in memory", hint="use one, or a directory")
    session.export_key()
    serve(
        Settings(
            store=place,
            namespace=session.namespace,
            host=host,
            port=port,
            workers=workers,
            root_path=path_prefix.rstrip("/"),
            allow_hosts=hosts,
            proxies=trust_proxy,
            drain_s=drain,
            log_level=log_level,
        )
    )
