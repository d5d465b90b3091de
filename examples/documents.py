"""Documents are summarised by a model, then put together into one report. Kill it anywhere: no call is paid twice.

    python examples/model_server.py --port 8000 &
    python examples/documents.py --url http://127.0.0.1:8000/v1 --store documents-store

Each document is summarised once, by whichever run asks first; `kedge llm stats` says what was spent and saved.
With a real vendor, leave --url out and set OPENAI_API_KEY. Needs the openai package.
"""

import argparse
import hashlib
import os
from typing import Any

import openai

import kedge

MODEL = "gpt-4o-mini"
SUBJECTS = [
    "tides",
    "moss",
    "copper",
    "lanterns",
    "rivers",
    "salt",
    "wool",
    "bridges",
    "clocks",
    "maps",
    "glass",
    "oak",
]


def documents() -> list[str]:
    """Made-up documents, two of them the same."""
    texts = [" ".join([subject] * (3 + n) + SUBJECTS[n:]) for n, subject in enumerate(SUBJECTS)]
    return [*texts, texts[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="documents-store")
    parser.add_argument("--url", help="where the model is  [default: the vendor's]")
    parser.add_argument("--run", default="documents", help="the key of the run")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")

    with kedge.open(chosen.store) as store, kedge.run(chosen.run, store=store) as run:
        client = openai.OpenAI(
            api_key=key, base_url=chosen.url, http_client=kedge.llm.http_client(store=store), max_retries=0
        )

        def ask(**request: Any) -> str:
            return str(client.chat.completions.create(**request).choices[0].message.content)

        def summarise(document: str) -> str:
            asked = [{"role": "user", "content": f"Summarise: {document}"}]
            return str(kedge.current_run().llm("summary", ask, model=MODEL, messages=asked))

        texts = run.step("read", documents)
        with run.stage("summaries"):
            summaries = run.map(summarise, texts, workers=chosen.workers)
        asked = [{"role": "user", "content": "Write one report of these: " + "; ".join(summaries)}]
        report = run.llm("report", ask, model=MODEL, messages=asked)
        client.close()
    print(f"{len(summaries)} summaries, {hashlib.sha256(report.encode()).hexdigest()[:16]}: {report}")


if __name__ == "__main__":
    main()
