"""docs/training-settings.md: every setting of a training run, as its docstring describes it.

Written anew by ``pytest tests/train/test_train_settings.py --write-support``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ditmesh.train.config import LoraConfig, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "training-settings.md"
HEAD = """# Settings of a training run

Written by `pytest tests/train/test_train_settings.py --write-support` from `ditmesh.train.TrainConfig`, never by
hand. A run is a YAML file of these names ([training](training.md)); `--set NAME=VALUE` changes one on the command
line, with dots into groups: `--set lora.rank=8`.
"""


def sections(model: type, first: str) -> dict[str, dict[str, str]]:
    """Descriptions by section and setting, from a docstring."""
    found: dict[str, dict[str, str]] = {}
    section, names = first, ()
    for line in (inspect.getdoc(model) or "").splitlines()[1:]:
        entry = re.match(r"    ([a-z][\w, ]*): (.*)", line)
        if re.match(r"[A-Z][\w ]*:?$", line):
            section = line.removesuffix(":") if first == "" else first
        elif entry:
            names = tuple(entry[1].split(", "))
            found.setdefault(section, {}).update(dict.fromkeys(names, entry[2]))
        elif line.startswith("        "):
            for name in names:
                found[section][name] += f" {line.strip()}"
    return found


def values(schema: dict[str, Any]) -> str:
    """What a setting takes, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(values(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "$ref" in schema or "allOf" in schema:
        return "settings"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    if schema["type"] == "array":
        return "list"
    least, most, above = (schema.get(key) for key in ("minimum", "maximum", "exclusiveMinimum"))
    limits = f" {least:g} to {most:g}" if least is not None and most is not None else ""
    if schema["type"] == "number" and (below := schema.get("exclusiveMaximum")) is not None:
        limits = f" {least:g} to below {below:g}"
    if not limits and schema.get("exclusiveMaximum") is None and (least is not None or above is not None):
        limits = f", at least {least:g}" if least is not None else f" above {above:g}"
    return kind[schema["type"]] + limits


def default(field: Any) -> str:
    """As YAML has it."""
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if hasattr(value, "model_dump"):
        return "one rank"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def as_markdown() -> str:
    parts = [HEAD]
    for model, prefix, first in ((TrainConfig, "", ""), (LoraConfig, "lora.", "LoRA")):
        schema = model.model_json_schema()["properties"]
        for section, described in sections(model, first).items():
            parts.append(f"\n## {section}\n\n| setting | takes | default | |\n|---|---|---|---|\n")
            for name, text in described.items():
                field = model.model_fields[name]
                told = re.sub(r"``?([^`]+)``?", r"`\1`", text)
                parts.append(f"| `{prefix}{name}` | {values(schema[name])} | {default(field)} | {told} |\n")
    return "".join(parts)


@pytest.mark.parametrize("model", [TrainConfig, LoraConfig], ids=lambda model: model.__name__)
def test_every_setting_is_described(model):
    described = [name for section in sections(model, "").values() for name in section]
    assert sorted(described) == sorted(model.model_fields)


def test_the_page_is_up_to_date(request):
    if request.config.getoption("--write-support"):
        PAGE.write_text(as_markdown(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), (
        "pytest tests/train/test_train_settings.py --write-support"
    )
