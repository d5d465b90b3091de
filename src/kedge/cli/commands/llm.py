"""`kedge llm`: cached LLM responses, and what calls cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import click

from kedge.cli.command import Session, apply_option, command_group, store_command
from kedge.cli.output import emit, to_json, write_all
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import count_of, size

if TYPE_CHECKING:
    from decimal import Decimal

    from kedge.llm import Bill
    from kedge.llm.pricing import Tokens


class Group(NamedTuple):
    """The bill of all calls with the same values of --by."""

    values: tuple[str, ...]
    bill: Bill


_FIELDS = ("model", "run", "step")


@store_command(
    "stats",
    json_keys='{"answers": n, "size_bytes": n, "total": BILL, "groups": [{FIELDS of --by, …BILL}]}; '
    "BILL is {paid, found, spent, saved (dollars as text), paid_unpriced, found_unpriced, tokens_paid, tokens_found}",
)
@click.option("--by", "by", multiple=True, type=click.Choice(_FIELDS), help="Group by this; repeatable.")
@click.option("--run", "run", help="Only calls of this run.")
def stats_command(session: Session, by: tuple[str, ...], run: str | None) -> None:
    """Show what LLM calls cost. SPENT is for calls that were made, SAVED for cache hits.

    Calls to models without a known price are counted as unpriced, never as free.
    """
    from kedge.llm import Bill, totals
    from kedge.llm.cache import JOB

    fields = by or ("model",)
    with session.open() as manager:
        bills = totals(manager, run=run, by=fields)
        numbers = manager.stats(JOB) if manager.jobs(JOB, limit=1) else {}
    total = sum(bills.values(), Bill())
    answers, size_bytes = numbers.get("checkpoints", 0), numbers.get("size_bytes", 0)
    if session.as_json:
        groups = [{**dict(zip(fields, key, strict=True)), **bill.to_json()} for key, bill in bills.items()]
        emit({"answers": answers, "size_bytes": size_bytes, "total": total.to_json(), "groups": groups})
        return
    print_facts([("answers", f"{answers:,} cached, {size(size_bytes)}"), ("calls", str(total) or "none yet")])
    if bills:
        click.echo()
        keys: list[Column[Group]] = [Column(name.upper(), _field(n), look="name") for n, name in enumerate(fields)]
        print_table([*keys, *_NUMBERS], [Group(values, bill) for values, bill in bills.items()])


def _field(n: int) -> Callable[[Group], str]:
    return lambda group: group.values[n]


def _count(calls: int) -> str:
    return f"{calls:,}" if calls else ""


def _money(calls: int, amount: Decimal, unpriced: int) -> str:
    from kedge.llm.pricing import dollars

    if not calls:
        return ""
    if calls == unpriced:
        return "unpriced"
    return dollars(amount) + (f" + {unpriced:,} unpriced" if unpriced else "")


def _tokens(tokens: Tokens) -> str:
    return f"{tokens.input:,} in, {tokens.output:,} out" if tokens.input or tokens.output else ""


_NUMBERS: tuple[Column[Group], ...] = (
    Column("PAID", lambda g: _count(g.bill.paid), ">", is_whole=True),
    Column("TOKENS", lambda g: _tokens(g.bill.tokens_paid), ">", is_whole=True, drop=2),
    Column("SPENT", lambda g: _money(g.bill.paid, g.bill.spent, g.bill.paid_unpriced), ">", is_whole=True),
    Column("CACHED", lambda g: _count(g.bill.found), ">", is_whole=True),
    Column("TOKENS", lambda g: _tokens(g.bill.tokens_found), ">", is_whole=True, drop=2),
    Column("SAVED", lambda g: _money(g.bill.found, g.bill.saved, g.bill.found_unpriced), ">", is_whole=True),
)


@store_command("clear", json_keys='{"answers": n, "applied": bool}')
@click.option("--model", help="Only responses of this model.")
@click.option("--older-than", metavar="AGE", help="Only responses older than this: 36h, 7d, 1d12h.")
@apply_option("Remove them. Without this, only say how many.")
def clear_command(session: Session, model: str | None, older_than: str | None, is_applied: bool) -> None:
    """Remove cached responses. The calls are then made and paid for again. Pinned responses and recorded costs stay.

    `kedge gc` frees their space.
    """
    from kedge.care.retention import parse_duration
    from kedge.llm import Cache

    older_than_s = None if older_than is None else parse_duration(older_than).total_seconds()
    with session.open() as manager:
        cache = Cache.of(manager)
        count = cache.clear(model, older_than_s, dry_run=not is_applied)
    text = "removed" if is_applied else "would be removed; run it again with --apply"
    session.answer({"answers": count, "applied": is_applied}, f"{count_of(count, 'answer')} {text}")


@store_command("export", json_keys="one line for each answer, with and without --json")
@click.option("--model", help="Only responses of this model.")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write to this file.  [default: stdout]")
@click.option("--force", is_flag=True, help="Replace the file.")
def export_command(session: Session, model: str | None, target: Path | None, force: bool) -> None:
    """Export cached responses as JSON lines.

    Each is {"id", "created_at", "model", "tokens", "cost", "request", "answer"}.
    """
    from kedge.cli.placement import place_file
    from kedge.codec.json_view import to_json_view
    from kedge.llm import Cache

    def write(out: BinaryIO) -> None:
        for entry, request, answer in cache.load(cache.entries(model)):
            line = {
                "id": entry.id,
                "created_at": entry.timestamp,
                "model": answer.model,
                "tokens": None if answer.tokens is None else answer.tokens.to_json(),
                "cost": None if answer.cost is None else format(answer.cost, "f"),
                "request": request,
                "answer": to_json_view(answer.content),
            }
            write_all(out, to_json(line, indent=None).encode() + b"\n")

    with session.open() as manager:
        cache = Cache.of(manager)
        if target is None:
            write(sys.stdout.buffer)
        else:
            place_file(target, write, force=force)


@store_command("proxy", json_keys='{"url": …} when it is ready')
@click.option("--port", type=click.IntRange(0, 65535), default=7421, show_default=True, help="The port to listen on.")
@click.option(
    "--mode",
    type=click.Choice(["record", "replay", "refresh"]),
    default="record",
    show_default=True,
    help="Use and fill the cache, only use it, or replace its responses.",
)
@click.option("--budget-day", type=float, metavar="DOLLARS", help="Send no call that could exceed this on a day (UTC).")
@click.option("--vendor", "vendors", multiple=True, metavar="NAME=URL", help="Another vendor to reach; repeatable.")
def proxy_command(session: Session, port: int, mode: str, budget_day: float | None, vendors: tuple[str, ...]) -> None:
    """Serve the LLM cache as a local proxy, for SDKs that take a base URL but no HTTP client.

    Use http://127.0.0.1:7421/openai/v1, …/anthropic or …/gemini as the base URL. It listens on this machine only.
    """
    from kedge.cli.pairs import parse_pairs
    from kedge.llm import Budget, http_client
    from kedge.llm.proxy import VENDORS, Proxy

    budget = None if budget_day is None else Budget(day=budget_day)
    known = {**VENDORS, **parse_pairs("--vendor", vendors)}
    with (
        session.open(create=True) as manager,
        http_client(mode, store=manager, budget=budget) as client,
        Proxy(client, port, known) as proxy,
    ):
        session.answer({"url": proxy.url}, *(f"{proxy.url}/{name} is {url}" for name, url in known.items()))
        sys.stdout.flush()
        proxy.serve_forever()


llm_command = command_group(
    "llm",
    [stats_command, clear_command, export_command, proxy_command],
    text="Show what LLM calls cost; clear or export cached responses; serve the cache as a proxy.",
)
