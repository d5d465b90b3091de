"""`kedge llm`: answers of models that are kept, and what they cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from kedge.cli.session import Session, emit, pass_on, shared_options, store_command, to_json, write_all
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import count_of, size

if TYPE_CHECKING:
    from kedge.llm import Bill
    from kedge.llm.pricing import Tokens

_FIELDS = ("model", "run", "step")


@store_command(
    "stats",
    json_keys='{"answers": n, "size_bytes": n, "total": BILL, "groups": [{FIELDS of --by, …BILL}]}; '
    "BILL is {paid, found, spent, saved (dollars as text), paid_unpriced, found_unpriced, tokens_paid, tokens_found}",
)
@click.option("--by", "by", multiple=True, type=click.Choice(_FIELDS), help="Group by this; may be given again.")
@click.option("--run", "run", help="Only calls of this run.")
def stats_command(session: Session, by: tuple[str, ...], run: str | None) -> None:
    """Show what calls of models cost: spent on those that were made, saved by those that were answered from the store.

    Models without a known price are unpriced; their calls are counted, never taken for free.
    """
    from kedge.llm import Bill, totals
    from kedge.llm.cache import JOB

    fields = by or ("model",)
    with session.open() as manager:
        bills = totals(manager, run=run, by=fields)
        kept = manager.stats(JOB) if manager.jobs(JOB, limit=1) else {}
    total = sum(bills.values(), Bill())
    answers, size_bytes = kept.get("checkpoints", 0), kept.get("size_bytes", 0)
    if session.as_json:
        groups = [{**dict(zip(fields, key, strict=True)), **bill.to_json()} for key, bill in bills.items()]
        emit({"answers": answers, "size_bytes": size_bytes, "total": total.to_json(), "groups": groups})
        return
    print_facts([("answers", f"{answers:,} kept, {size(size_bytes)}"), ("calls", str(total) or "none yet")])
    if bills:
        click.echo()
        columns = [Column(field.upper(), look="name") for field in fields]
        numbers = [Column(title, align=">", is_whole=True, drop=drop) for title, drop in _NUMBERS]
        print_table([*columns, *numbers], [(*key, *_numbers(bill)) for key, bill in bills.items()])


_NUMBERS = (("PAID", 0), ("TOKENS", 2), ("SPENT", 0), ("FOUND", 0), ("TOKENS", 2), ("SAVED", 0))


def _numbers(bill: Bill) -> tuple[str, ...]:
    return (
        f"{bill.paid:,}" if bill.paid else "",
        _tokens(bill.tokens_paid),
        _money(bill.paid, bill.spent, bill.paid_unpriced),
        f"{bill.found:,}" if bill.found else "",
        _tokens(bill.tokens_found),
        _money(bill.found, bill.saved, bill.found_unpriced),
    )


def _money(calls: int, amount: object, unpriced: int) -> str:
    from decimal import Decimal

    from kedge.llm.pricing import dollars

    if not calls:
        return ""
    if calls == unpriced:
        return "unpriced"
    assert isinstance(amount, Decimal)
    return dollars(amount) + (f" + {unpriced:,} unpriced" if unpriced else "")


def _tokens(tokens: Tokens) -> str:
    return f"{tokens.input:,} in, {tokens.output:,} out" if tokens.input or tokens.output else ""


@store_command("clear", json_keys='{"answers": n, "applied": bool}')
@click.option("--model", help="Only answers of this model.")
@click.option("--older-than", metavar="AGE", help="Only answers older than this: 36h, 7d, 1d12h.")
@click.option("--apply", "--yes", "-y", "is_applied", is_flag=True, help="Forget. Without it, only say how many.")
def clear_command(session: Session, model: str | None, older_than: str | None, is_applied: bool) -> None:
    """Forget answers, so that they are asked and paid for again. Pinned ones stay, and so does what they cost.

    `kedge gc` gives back their space.
    """
    from kedge.care.retention import parse_duration
    from kedge.llm import Cache

    older_than_s = None if older_than is None else parse_duration(older_than).total_seconds()
    with session.open() as manager:
        cache = Cache.of(manager)
        count = cache.clear(model, older_than_s, dry_run=not is_applied)
    if session.as_json:
        emit({"answers": count, "applied": is_applied})
    elif is_applied:
        click.echo(f"{count_of(count, 'answer')} forgotten")
    else:
        click.echo(f"{count_of(count, 'answer')} would be forgotten; --apply does it")


@store_command("export", json_keys="one line for each answer in any case")
@click.option("--model", help="Only answers of this model.")
@click.option("--to", "target", type=click.Path(path_type=Path), help="A file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace the file.")
def export_command(session: Session, model: str | None, target: Path | None, force: bool) -> None:
    """Write answers as JSON lines: {"id", "created_at", "model", "tokens", "cost", "request", "answer"}."""
    from kedge.cli.placement import place_file
    from kedge.codec.json_view import to_json_view
    from kedge.llm import Cache

    def write(out: BinaryIO) -> None:
        for entry in cache.entries(model):
            request, answer = cache.load(entry)
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


llm_command = click.Group(
    "llm",
    commands=[stats_command, clear_command, export_command],
    callback=pass_on,
    params=shared_options(),
    help="Answers of models that are kept: what they cost, forgetting them, exporting them.",
    epilog="JSON: kedge llm COMMAND --help says what each one answers",
)
