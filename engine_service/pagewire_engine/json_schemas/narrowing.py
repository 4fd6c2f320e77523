"""JSON schemas in the words that llguidance has.

A keyword that it lacks is put in others that allow the same, or less: what meets the schema that
comes out meets the one that went in. `oneOf`, for one, becomes `anyOf` where no two branches have a
value in common, and else each branch without what the others allow.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import DATA_KEYWORDS, MAPS_OF_SCHEMAS
from pagewire_engine.json_schemas import members
from pagewire_engine.json_schemas.complements import Complements, any_of
from pagewire_engine.json_schemas.disjoint import ANNOTATIONS, Facts, listed, mapping, value_key
from pagewire_engine.json_schemas.document import Document, Schema, wrong
from pagewire_engine.json_schemas.patterns import has_look_around, without_look_aheads
from pagewire_engine.json_schemas.places import MOST_VALUES, few_values

# The values of `format` that llguidance enforces. By Draft 2020-12 a format is an annotation, and
# one that is not known is to be ignored.
_FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    )
)
_DEFINITIONS = frozenset(("$defs", "definitions"))
_IDENTITIES = frozenset(("$anchor", "$id", "id"))
# Alternatives double with each `if` or dependency; where there are more, they come together.
_MOST_DOUBLINGS = 3
_MOST_SCHEMAS = 20_000


class Narrowing:
    """Rewrites one document.

    Args:
        document: the schema.
        lenient: leave out what can't be put otherwise; without it that is left as it is, for
            llguidance to refuse, or refused here with the reason.
    """

    def __init__(self, document: Document, *, lenient: bool) -> None:
        self._document = document
        self._lenient = lenient
        self._facts = Facts(document)
        self._complements = Complements(document, self._facts)
        self._names: dict[int, str] = {}
        self._to_do: list[tuple[str, Schema]] = []
        self._num_schemas = 0

    def rewritten(self) -> dict[str, Any]:
        """The schema that comes out, with all that is referred to in its `$defs`."""
        root = self._schema(self._document.root)
        definitions: dict[str, Schema] = {}
        while self._to_do:
            name, schema = self._to_do.pop()
            definitions[name] = self._schema(schema)
        if not isinstance(root, dict):
            root = {"type": "object"} if root else {"not": {}}
        return root | {"$defs": definitions} if definitions else root

    def _schema(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        if self._num_schemas > _MOST_SCHEMAS:
            raise wrong("has too many alternatives to be kept: simplify its oneOf, not, and if")
        if "$ref" in schema and self._document.ignores_siblings_of_references:
            return self._reference(schema["$ref"])
        schema = self._in_newest_words(schema)
        if "not" in schema and self._facts.allows_all(schema["not"]):
            return False
        also: list[Schema] = []
        for keywords, rewrite in (
            (("if", "then", "else"), self._conditions),
            (("dependentRequired", "dependentSchemas"), self._dependencies),
            (("oneOf",), self._one_of),
            (("not",), self._not),
            (("contains", "minContains", "maxContains"), members.containing),
        ):
            if any(keyword in schema for keyword in keywords):
                schema = self._tried(schema, keywords, rewrite, also)
        for rewrite_members in (
            members.with_any_name,
            members.with_names,
            members.with_most,
            members.with_least,
            members.all_evaluated,
        ):
            schema = rewrite_members(schema, self._facts)
        schema = self._without_look_around(schema, also)
        schema = self._with_unique_items(schema)
        schema = self._without_idle_type(schema, also)
        return self._inner(schema, also)

    def _tried(
        self,
        schema: dict[str, Any],
        keywords: tuple[str, ...],
        rewrite: Callable[[dict[str, Any]], list[Schema] | None],
        also: list[Schema],
    ) -> dict[str, Any]:
        found = rewrite(schema)
        if found is None:
            if not self._lenient:
                raise _unserved(keywords[0], schema[keywords[0]])
            found = [{"anyOf": schema["oneOf"]}] if "oneOf" in keywords else []
        also += found
        return {key: value for key, value in schema.items() if key not in keywords}

    def _inner(self, schema: dict[str, Any], also: list[Schema]) -> Schema:
        """The same with its inner schemas rewritten, and those of `also` beside them."""
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ANNOTATIONS or key in _DEFINITIONS or key in _IDENTITIES:
                continue
            if key == "format" and isinstance(value, str) and value not in _FORMATS:
                continue
            if key == "$ref":
                kept |= self._reference(value)
            elif key in DATA_KEYWORDS:
                kept[key] = value
            elif key in MAPS_OF_SCHEMAS and isinstance(value, dict):
                kept[key] = {name: self._schema(each) for name, each in value.items()}
            elif isinstance(value, list):
                kept[key] = [self._schema(each) for each in value]
            else:
                kept[key] = self._schema(value)
        for each in also:
            kept.setdefault("allOf", []).append(self._schema(each))
        return _without_repetition(kept)

    def _reference(self, reference: Any) -> dict[str, Any]:
        target = self._document.target(reference) if isinstance(reference, str) else None
        if target is None:
            return {"$ref": reference}
        if not isinstance(target, dict):
            return {} if target else {"not": {}}
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._to_do.append((name, target))
        return {"$ref": f"#/$defs/{name}"}

    def _in_newest_words(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The same in the words of Draft 2020-12."""
        schema = dict(schema)
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if (
                isinstance(schema.get(exclusive), bool)
                and schema.pop(exclusive)
                and bound in schema
            ):
                schema[exclusive] = schema.pop(bound)
        if isinstance(schema.get("items"), list):
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema["additionalItems"]
        schema.pop("additionalItems", None)
        if isinstance(schema.get("required"), bool):
            del schema["required"]
        for name, needed in mapping(schema.pop("dependencies", None)).items():
            key = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
            if isinstance(needed, str):
                key, needed = "dependentRequired", [needed]
            schema[key] = mapping(schema.get(key)) | {name: needed}
        return schema

    def _one_of(self, schema: dict[str, Any]) -> list[Schema] | None:
        branches = listed(schema["oneOf"])
        context = {key: value for key, value in schema.items() if key != "oneOf"}
        kept: list[Schema] = []
        for index, branch in enumerate(branches):
            mine = {"allOf": [branch, context]}
            others = [
                other
                for place, other in enumerate(branches)
                if place != index and not self._facts.disjoint(mine, other)
            ]
            if not others:
                kept.append(branch)
                continue
            without = [self._complements.of(other, mine) for other in others]
            if all(without):
                kept.append({"allOf": [branch, *(any_of(some) for some in without)]})
        return [any_of(kept)] if kept else None

    def _not(self, schema: dict[str, Any]) -> list[Schema] | None:
        context = {key: value for key, value in schema.items() if key != "not"}
        if self._facts.disjoint(schema["not"], context):
            return []
        found = self._complements.of(schema["not"], context)
        return [any_of(found)] if found else None

    def _conditions(self, schema: dict[str, Any]) -> list[Schema] | None:
        if "if" not in schema:
            return []
        condition, then = schema["if"], schema.get("then", True)
        otherwise = schema.get("else", True)
        if then is True and otherwise is True:
            return []
        context = {k: v for k, v in schema.items() if k not in ("if", "then", "else")}
        unless = self._complements.of(condition, context)
        ways: list[Schema] = [{"allOf": [condition, then]}]
        if unless:
            ways.append({"allOf": [any_of(unless), otherwise]})
        else:
            ways.append({"allOf": [then, otherwise]})
        return [any_of([way for way in ways if not self._facts.disjoint(way, context)] or ways)]

    def _dependencies(self, schema: dict[str, Any]) -> list[Schema] | None:
        required = self._facts.required(schema)
        needs: dict[str, list[Schema]] = {}
        for name, names in mapping(schema.get("dependentRequired")).items():
            if more := [each for each in listed(names) if each not in required]:
                needs.setdefault(name, []).append({"required": more})
        for name, needed in mapping(schema.get("dependentSchemas")).items():
            needs.setdefault(name, []).append(needed)
        found: list[Schema] = []
        for name in [each for each in needs if each in required]:
            found += needs.pop(name)
        if len(needs) <= _MOST_DOUBLINGS:
            for name, some in needs.items():
                present = {"required": [name], "allOf": some}
                found.append({"anyOf": [{"properties": {name: False}}, present]})
        elif needs:
            every = list(itertools.chain.from_iterable(needs.values()))
            without: Schema = {"properties": dict.fromkeys(needs, False)}
            found.append({"anyOf": [without, {"allOf": every}]})
        return found

    def _without_idle_type(self, schema: dict[str, Any], also: list[Schema]) -> dict[str, Any]:
        """Without a `type` that all alternatives have: beside it llguidance follows no reference
        that leads back to where it stands."""
        choices = [
            each["anyOf"] for each in (schema, *also) if isinstance(each, dict) and "anyOf" in each
        ]
        if "type" not in schema or not choices:
            return schema
        types = self._facts.types({"type": schema["type"]})
        if all(self._facts.types(each) <= types for each in listed(choices[0])):
            return {key: value for key, value in schema.items() if key != "type"}
        return schema

    def _with_unique_items(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without `uniqueItems`, which `unique_items.UniqueItems` sees to, but with as many items
        at most as there are values."""
        if not isinstance(schema.get("uniqueItems"), bool):
            return schema
        rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
        items = schema.get("items")
        if schema["uniqueItems"] and isinstance(items, dict) and "prefixItems" not in schema:
            values = few_values(items, self._facts)
            if values is not None:
                most = min(len({value_key(v) for v in values}), schema.get("maxItems", MOST_VALUES))
                rest["maxItems"] = most
        return rest

    def _without_look_around(self, schema: dict[str, Any], also: list[Schema]) -> dict[str, Any]:
        schema = dict(schema)
        pattern = schema.get("pattern")
        if (
            isinstance(pattern, str)
            and has_look_around(pattern)
            and (found := without_look_aheads(pattern)) is not None
        ):
            del schema["pattern"]
            also += [{"pattern": each} for each in found]
        patterns = mapping(schema.get("patternProperties"))
        if any(has_look_around(each) for each in patterns):
            # Names that a narrower pattern leaves out would be others: it has to be the same.
            found_by_name = {each: without_look_aheads(each) or [each] for each in patterns}
            if all(len(found) == 1 for found in found_by_name.values()):
                schema["patternProperties"] = {
                    found_by_name[each][0]: value for each, value in patterns.items()
                }
        return schema


def _without_repetition(schema: dict[str, Any]) -> Schema:
    """Without what stands twice in its `allOf`, and without an `allOf` of one alone."""
    if not isinstance(schema.get("allOf"), list):
        return schema
    parts: list[Schema] = []
    for part in schema["allOf"]:
        if part not in parts:
            parts.append(part)
    if len(parts) == 1 and len(schema) == 1:
        return parts[0]
    return schema | {"allOf": parts}


def _unserved(keyword: str, part: Any) -> InvalidArgumentError:
    reasons = {
        "oneOf": "no branch can be told from the others",
        "not": "what it leaves can't be said",
        "contains": "it is bounded from above, or asks for too many",
    }
    return wrong(
        f"can't be served: {keyword} of {json.dumps(part, ensure_ascii=False)[:100]}: "
        f"{reasons.get(keyword, 'it is not supported')}"
    )
