"""The list of models, as the SDKs of both dialects read it."""

import anthropic.pagination
import anthropic.types
import openai.pagination
import openai.types
import orjson

from etude.gateway.api.openai import list_body, one_body


def test_both_sdks_read_the_list() -> None:
    body = orjson.loads(list_body(["policy", "other"]))
    theirs = openai.pagination.SyncPage[openai.types.Model].model_validate(body)
    assert [(model.id, model.object) for model in theirs.data] == [("policy", "model"), ("other", "model")]
    page = anthropic.pagination.SyncPage[anthropic.types.ModelInfo].model_validate(body)
    assert [(model.id, model.type, model.display_name) for model in page.data] == [
        ("policy", "model", "policy"),
        ("other", "model", "other"),
    ]
    assert (page.first_id, page.last_id, page.has_next_page()) == ("policy", "other", False)


def test_both_sdks_read_one() -> None:
    body = one_body("policy")
    assert openai.types.Model.model_validate_json(body).id == "policy"
    assert anthropic.types.ModelInfo.model_validate_json(body).created_at.year == 1970


def test_a_gateway_without_models_has_an_empty_page() -> None:
    assert anthropic.pagination.SyncPage[anthropic.types.ModelInfo].model_validate_json(list_body([])).data == []
