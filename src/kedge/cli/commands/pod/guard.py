"""`kedge pod guard`."""

from __future__ import annotations

import signal
import threading

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import Stores
from kedge.cli.output import emit
from kedge.terminal.text import safe


@store_command("guard", json_keys='{"failed": [{job, reason}]}, one line for each round that had failures')
@click.option("--every", "every_s", type=click.FloatRange(1, 3600), default=60, show_default=True, metavar="SECONDS",
              help="How often; less than KEDGE_CLAIM_S, which is 300.")  # fmt: skip
@click.option("--once", is_flag=True, help="Do one round, then end.")
def guard_command(session: Session, every_s: float, once: bool) -> None:
    """Renew the claims of containers that run on this node, until SIGTERM. Run one on each node.

    While it runs, no other node takes over these containers. If the node dies, its claims expire after five minutes.
    """
    from kedge.containers.runtime.claims import renew_here

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Stores(session):
        while True:
            failed = renew_here()
            if failed and session.as_json:
                emit({"failed": [{"job": job, "reason": why} for job, why in failed]}, indent=None)
            for job, why in () if session.as_json else failed:
                click.echo(f"{safe(job)}: {safe(why)}", err=True)
            if once or stop.wait(every_s):
                break
