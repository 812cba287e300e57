"""
The views of an audit's report: JSON and its schema, the table, the page with its pictures, and what autocast does.
"""

from __future__ import annotations
from typing import Any, Dict
import json
import pytest
import torch
from audit_cases import plain_ops, run_audit  # noqa: F401, an autouse fixture
from returnn_upcast import audit
from returnn_upcast.audit import autocast, html, plots, table


def test_json_has_the_documented_schema():
    for report in (run_audit("float16", scale=400.0), run_audit("float32"), run_audit("float16", loss="ctc")):
        data = json.loads(report.to_json(), parse_constant=lambda x: pytest.fail(x))
        _validate(data, audit.json_schema(), "report")
    assert "inf" in json.dumps(data["sites"])


def _validate(value: Any, schema: Dict[str, Any], where: str):
    if "anyOf" in schema:
        assert any(_fits(value, option) for option in schema["anyOf"]), (where, value)
        return _validate(value, next(option for option in schema["anyOf"] if _fits(value, option)), where)
    assert _fits(value, schema), (where, value, schema)
    if schema.get("type") == "object" and "properties" in schema:
        assert set(value) == set(schema["properties"]), where
        for key, x in value.items():
            _validate(x, schema["properties"][key], f"{where}.{key}")
    elif schema.get("type") == "object":
        for key, x in value.items():
            _validate(x, schema["additionalProperties"], f"{where}.{key}")
    elif schema.get("type") == "array":
        for x in value:
            _validate(x, schema["items"], f"{where}[]")


def _fits(value: Any, schema: Dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, bool):
        return schema["type"] == "boolean"
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    return isinstance(value, kinds[schema["type"]]) if schema["type"] in kinds else False


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_table_fits(width: int):
    report = run_audit("float16", loss="ctc")
    text = table.render(report, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("* Stock fails with") and "body.first" in text


def test_page_and_pictures():
    pytest.importorskip("matplotlib")
    report = run_audit("float16", scale=400.0)
    report.name = "<script>"
    page = html.page(report)
    assert page.count("data:image/svg+xml;base64,") == len(plots.pictures(report)) == 3
    assert "<script" not in page and "<link" not in page and "src='http" not in page and "body.first" in page
    assert plots.overview(report).startswith(b"\x89PNG") and plots.overview(run_audit("float32")).startswith(b"\x89PNG")
    assert "No effect" in html.page(run_audit("float32"))


def test_autocast_lists():
    found = autocast.behavior(torch.bfloat16, "cpu")
    assert found["cuda"]["layer_norm"] == found["cuda"]["log_softmax"] == "float32"
    assert found["cuda"]["matmul"] == found["cuda"]["mean"] == found["cpu"]["layer_norm"] == "bfloat16"
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
