"""Never pay twice for an LLM call.

client = openai.OpenAI(http_client=kedge.llm.http_client(store="my-store"))     # any call, including streams
text = run.llm("summarise", ask, model="gpt-5-mini", messages=[…])                 # in a pipeline

request   method, URL, and body as canonical JSON: model, parameters, messages, tools; never headers
answer    the cached response: a checkpoint of the job `llm:cache`, found by the request's key
bill      what calls cost, with spent and saved apart; `llm:calls` has a record of every paid call
"""

from __future__ import annotations

from .bills import Bill, totals
from .budget import Budget
from .cache import Cache
from .keys import sample
from .transport import async_http_client, http_client

__all__ = ["Bill", "Budget", "Cache", "async_http_client", "http_client", "sample", "totals"]
