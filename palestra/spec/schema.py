"""The JSON schema of spec files, for editors, made from the types."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from palestra.spec.kinds import kinds, spec_type
from palestra.spec.model import Model, plain
from palestra.spec.validate import models

_VARIABLE = {"$ref": "#/$defs/Variable"}
_EXTENDS = {
    "description": "A spec (file.yaml, file.yaml:name or :name) or several, under what is written here.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with defaults as a spec writes them and without titles that repeat the key."""

    def encode_default(self, dft: Any) -> Any:
        """The default as plain data."""
        return plain(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: the key says it."""
        return False


def json_schema() -> dict[str, Any]:
    """One schema for the files of all kinds: a spec, or a mapping of named specs."""
    types = {kind: spec_type(kind) for kind in sorted(kinds())}
    pairs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in types.values()]
    definitions = models_json_schema(pairs, schema_generator=_Generator)[1]["$defs"]
    described = _descriptions(Model)
    definitions = {name: _definition(schema, described.get(name, {})) for name, schema in definitions.items()}
    for kind, model in types.items():
        properties = definitions[model.__name__]["properties"]
        properties["extends"] = _EXTENDS
        properties["kind"] = {"const": kind, "description": properties["kind"].get("description", "")}
    definitions["Variable"] = {"type": "string", "pattern": r"\$\{[^{}]+\}", "description": "Filled by -s name=value."}
    definitions["Spec"] = _spec(types)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Palestra spec",
        "type": "object",
        "if": {"anyOf": [{"required": ["kind"]}, {"required": ["extends"]}]},
        "then": {"$ref": "#/$defs/Spec"},
        "else": {"patternProperties": {"^_": {}}, "additionalProperties": {"$ref": "#/$defs/Spec"}},
        "$defs": definitions,
    }


def _spec(types: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """A spec of any kind; what its kind requires may be missing where it extends another."""
    whole = {"not": {"required": ["extends"]}}
    cases: list[dict[str, Any]] = [{"if": whole, "then": {"required": ["kind"]}}]
    for kind, model in types.items():
        is_kind = {"required": ["kind"], "properties": {"kind": {"const": kind}}}
        cases.append({"if": is_kind, "then": {"$ref": f"#/$defs/{model.__name__}"}})
        cases.append({"if": {"allOf": [is_kind, whole]}, "then": _required(model, besides=("name",))})
    any_kind = {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in types.values()]}
    cases.append({"if": {"not": {"required": ["kind"]}}, "then": any_kind})
    return {
        "type": "object",
        "properties": {"kind": {"enum": list(types), "description": "The kind of experiment."}},
        "allOf": cases,
    }


def _required(model: type[BaseModel], besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys a model requires, and those that the models inside it require."""
    keys = [name for name, field in model.model_fields.items() if field.is_required() and name not in besides]
    inner = {name: _required_inside(field) for name, field in model.model_fields.items()}
    return {"required": keys, "properties": {name: schema for name, schema in inner.items() if schema}}


def _required_inside(field: FieldInfo) -> dict[str, Any] | None:
    members = list(models(field.annotation))
    if field.discriminator is not None:  # what tells the members of a union apart; the rest they ask for themselves
        return {"required": [field.discriminator]}
    if len(members) != 1 or field.annotation is not members[0]:
        return None  # lists hold whole items
    schema = _required(members[0])
    return schema if schema["required"] or schema["properties"] else None


def _descriptions(base: type[Model]) -> dict[str, dict[str, str]]:
    """Of every field of every model that derives from it."""
    descriptions = {base.__name__: base.descriptions()}
    for model in base.__subclasses__():
        descriptions |= _descriptions(model)
    return descriptions


def _definition(schema: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a mapping, described, in which no key is required and values may be a `${variable}`."""
    properties = {}
    for key, value in schema.get("properties", {}).items():
        if key in texts:
            value = dict(sorted({**value, "description": texts[key]}.items()))
        properties[key] = _or_variable(value)
    rest = {key: value for key, value in schema.items() if key != "required"}
    return rest | {"properties": properties} if properties else rest


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    free_text = schema.get("type") == "string" and not {"pattern", "enum"} & set(schema)
    if "const" in schema or "$ref" in schema or free_text:
        return schema
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    if "oneOf" in schema:  # without the key that tells its members apart, as in a spec that extends one, several fit
        schema = {"anyOf": schema["oneOf"]}
    value = {key: item for key, item in schema.items() if key not in about}
    if set(value) == {"anyOf"}:
        return about | {"anyOf": [*map(_items_or_variable, value["anyOf"]), _VARIABLE]}
    return about | {"anyOf": [_items_or_variable(value), _VARIABLE]}


def _items_or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"items": _or_variable(schema["items"])} if "items" in schema else schema
