"""Work shared by pods: each takes items from PostgreSQL, one at a time, and keeps what comes out in the store.

    KEDGE_STORE=postgresql://user@db/kedge python items.py fill 1000
    KEDGE_STORE=postgresql://user@db/kedge python items.py work

`FOR UPDATE SKIP LOCKED` gives every pod another item without waiting. An item is leased for a while: a pod that is
killed loses it when the time is over, and another one takes it. Each item is a job of the store, written under a lease
of its own: a pod that was only slow, and comes back late, is refused instead of overwriting.
"""

import os
import sys
import time
from typing import Any

import psycopg

import kedge
from kedge.errors import Conflict

LEASE_S = float(os.environ.get("ITEM_LEASE_S", "60"))
POD = f"pod {os.environ.get('JOB_COMPLETION_INDEX', '0')}"  # which an Indexed Job tells

TABLE = """
CREATE TABLE IF NOT EXISTS item (
    name text PRIMARY KEY,
    taken_until timestamptz NOT NULL DEFAULT '-infinity',
    is_done boolean NOT NULL DEFAULT false
)"""
TAKE = """
UPDATE item SET taken_until = clock_timestamp() + make_interval(secs => %s) WHERE name = (
    SELECT name FROM item WHERE NOT is_done AND taken_until < clock_timestamp()
    ORDER BY name LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING name"""
LEFT = "SELECT count(*) FROM item WHERE NOT is_done"


def process(name: str) -> dict[str, Any]:
    """Whatever an item needs; here it takes a moment."""
    time.sleep(float(os.environ.get("ITEM_TAKES_S", "0.1")))
    return {"item": name, "length": len(name)}


def fill(db: psycopg.Connection[Any], count: int) -> None:
    db.execute(TABLE)
    names = [f"item-{n:06}" for n in range(count)]
    db.execute("INSERT INTO item (name) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING", (names,))


def work(db: psycopg.Connection[Any], store: kedge.CheckpointManager) -> None:
    while True:
        taken = db.execute(TAKE, (LEASE_S,)).fetchone()
        if taken is None:
            if db.execute(LEFT).fetchone() == (0,):
                return
            time.sleep(min(1.0, LEASE_S / 4))  # the rest is with others, or was with somebody who died
            continue
        name = taken[0]
        try:
            with store.lease(name, ttl_s=LEASE_S) as lease:
                if store.load_latest(name) is None:  # else it was kept, but not ticked off, by a pod that died
                    print(f"{POD}: {name} begun", flush=True)
                    store.save(name, "done", process(name), metadata={"by": POD}, lease=lease)
        except Conflict as error:  # another pod has it
            print(f"{POD}: {name}: {error}", flush=True)
            continue
        db.execute("UPDATE item SET is_done = true WHERE name = %s", (name,))
        print(f"{POD}: {name} done", flush=True)


def main() -> None:
    url = os.environ["KEDGE_STORE"]
    with psycopg.connect(os.environ.get("ITEMS_DATABASE") or url, autocommit=True) as db:
        if sys.argv[1] == "fill":
            fill(db, int(sys.argv[2]))
            return
        with kedge.open(url) as store:
            work(db, store)


if __name__ == "__main__":
    main()
