"""Kedge against its peers: `./dev bench store`. What is compared with what, and how: docs/benchmarks.md."""
