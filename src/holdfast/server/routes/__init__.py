"""The routes, one file per noun."""

API = "/api/v1"
