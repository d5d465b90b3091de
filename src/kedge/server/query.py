"""The query of an address: every parameter is one the route has, is there once unless it may repeat, and has its form.

A misspelled parameter is a mistake, not a wish for the default; of one that is there twice, none is the one meant.
Frameworks let both pass, and read "1", "on" and "yes" as true, and "1_000" or " 5" as whole numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, get_args

from fastapi._compat import field_annotation_is_sequence, get_cached_model_fields
from pydantic import BaseModel
from starlette.datastructures import QueryParams

from kedge.errors import Validation

_FORMS = {  # as OpenAPI says them
    bool: (re.compile("true|false"), "true or false"),
    int: (re.compile(r"-?[0-9]{1,20}(\.0{1,20})?"), "a whole number"),  # 3.0 is one, to JSON
}


@dataclass(frozen=True, slots=True)
class QueryRule:
    """What the query of a route may hold."""

    known: frozenset[str]
    repeatable: frozenset[str]
    forms: dict[str, tuple[re.Pattern[str], str]]

    def check(self, query: QueryParams) -> None:
        """Validation, which names the parameter, for a query that says something else than the route would read."""
        given = query.multi_items()
        if unknown := sorted({name for name, _ in given} - self.known):
            hint = f"there is: {', '.join(sorted(self.known))}" if self.known else "this address takes none"
            raise Validation(f"there is no parameter {unknown[0][:80]!r}", hint=hint)
        seen: set[str] = set()
        for name, value in given:
            if name in seen and name not in self.repeatable:
                raise Validation(f"parameter {name!r} is there more than once", hint="give it once")
            seen.add(name)
            if name in self.forms and self.forms[name][0].fullmatch(value) is None:
                raise Validation(f"parameter {name!r} must be {self.forms[name][1]}", hint="see /openapi.json")


def query_rule(dependant: Any, *, is_page: bool) -> QueryRule:
    """What a route's signature states; a page takes the namespace from its address, too, and values of forms."""
    fields = _fields(dependant)
    known = {field.alias for field in fields} | ({"namespace"} if is_page else set())
    repeatable = {field.alias for field in fields if field_annotation_is_sequence(field.field_info.annotation)}
    forms = {} if is_page else {field.alias: form for field in fields if (form := _form(field)) is not None}
    return QueryRule(frozenset(known), frozenset(repeatable), forms)


def _fields(dependant: Any) -> list[Any]:
    """Every parameter of the query; a model stands for the fields it has."""
    fields = [field for dependency in dependant.dependencies for field in _fields(dependency)]
    for field in dependant.query_params:
        kind = field.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
        fields += get_cached_model_fields(kind) if is_model else [field]
    return fields


def _form(field: Any) -> tuple[re.Pattern[str], str] | None:
    kinds = (field.field_info.annotation, *get_args(field.field_info.annotation))
    return next((form for kind, form in _FORMS.items() if kind in kinds), None)
