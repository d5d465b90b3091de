"""`kedge container doctor`: what this machine needs for containers."""

from __future__ import annotations

from kedge.cli.command import Session, store_command
from kedge.cli.findings import answer_findings


@store_command(
    "doctor", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}], "host": facts for preflight --target}'
)
def doctor_command(session: Session) -> None:
    """Check CRIU, the container runtimes, the kernel and your permissions; say how to install what is missing."""
    from kedge.containers.doctor import findings
    from kedge.containers.hosts import facts

    answer_findings(session, findings(), 1, host=facts())
