"""A release that a person has to approve: it exits while it waits, and continues when it is approved.

    python examples/approval.py 1.2.0                 builds, tests, asks, and exits with code 75
    kedge runs show release-1.2.0                  what it waits for
    kedge approve release-1.2.0 --resume           decides, for good, and starts it again
    kedge approve release-1.2.0 --deny             … or ends it

The store is $KEDGE_STORE, else ./.kedge.
"""

import sys
import time

import kedge


@kedge.step
def build(version: str) -> dict[str, object]:
    print(f"building {version}", flush=True)
    time.sleep(0.3)
    return {"file": f"app-{version}.tar", "size": 1_234_567}


@kedge.step(retries=2, name="test {part}")
def test(part: str, artifact: dict[str, object]) -> bool:
    print(f"testing {part} of {artifact['file']}", flush=True)
    time.sleep(0.3)
    return True


@kedge.step
def publish(artifact: dict[str, object], approved_by: str) -> str:
    print(f"publishing {artifact['file']}, approved by {approved_by}", flush=True)
    return f"https://example.org/{artifact['file']}"


def main(version: str) -> None:
    with kedge.run(f"release-{version}") as run:
        artifact = build(version)
        with run.stage("tests"):
            for part in ("units", "pages", "upgrade"):
                test(part, artifact)
        run.log(f"built and tested {artifact['file']}")
        decision = run.approval("go live", prompt=f"Publish {artifact['file']}?", expires_s=7 * 86_400, wait_s=0)
        print(f"published at {publish(artifact, decision.actor)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "1.0.0")
