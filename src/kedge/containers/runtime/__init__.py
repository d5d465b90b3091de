"""`kedge-runc`: the OCI runtime that checkpoints containers that opted in."""
