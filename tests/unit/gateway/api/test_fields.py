"""Reading JSON bodies field by field: bounds, and errors that name path, value and expectation."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.api.calls import ApiError
from etude.gateway.api.fields import QUOTED_CHARACTERS, JsonObject, quote, read_object
from etude.types import Json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refused(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str, str | None]:
    return error.value.status, error.value.code, error.value.param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"NaN", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b'{"a": 1e999}', b"{'a': 1}"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        read_object(body)
    assert refused(error) == (400, "invalid_request", None)


def test_a_body_of_brackets_is_refused_or_read_in_no_time() -> None:
    for levels in (900, 10**6):
        body = b'{"a": ' + b"[" * levels + b"]" * levels + b"}"
        try:
            fields = read_object(body)
        except ApiError as api_error:
            assert api_error.status == 400
        else:
            with pytest.raises(ApiError, match="a list of 1: expected a string"):
                fields.text("a")


def test_the_last_of_two_equal_keys_counts() -> None:
    assert read_object(b'{"a": 1, "a": 2}').integer("a", low=0, high=9) == 2


def test_null_is_absent() -> None:
    fields = JsonObject(dict.fromkeys("abcdefg"))
    assert fields.text("a", "x") == "x"
    assert (fields.flag("b", default=True), fields.integer("c", low=1, high=2), fields.items("d")) == (True, None, [])
    assert (fields.number("e", low=1, high=2), fields.child("f"), fields.children("g")) == (None, None, [])
    assert (fields.document("a"), fields.choice("a", ["b"]), fields.value("a")) == ({}, None, None)
    fields.refuse_unknown(())


def test_every_error_names_path_value_and_what_was_expected() -> None:
    fields = JsonObject(
        {"parts": [{"text": 3, "flag": 1, "count": True, "share": "x", "deep": []}, None]}, "messages[3]"
    )
    with pytest.raises(ApiError, match=r"messages\[3\]\.parts\[1\] is missing or null: expected an object"):
        fields.children("parts")
    part = JsonObject({"text": 3, "flag": 1, "count": True, "share": "x", "deep": []}, "messages[3].parts[0]")
    for read, message in (
        (lambda: part.text("text"), "text=3: expected a string"),
        (lambda: part.text("other"), "other is missing or null: expected a string"),
        (lambda: part.flag("flag"), "flag=1: expected true or false"),
        (lambda: part.integer("count", low=0, high=5), "count=true: expected a whole number from 0 to 5"),
        (lambda: part.number("share", low=0, high=1), 'share="x": expected a number from 0 to 1'),
        (lambda: part.number("share", low=0, high=1, above=True), 'share="x": expected a number above 0 to 1'),
        (lambda: part.child("deep"), "deep=a list of 0: expected an object"),
        (lambda: part.document("deep"), "deep=a list of 0: expected an object"),
        (lambda: part.items("text"), "text=3: expected a list"),
        (lambda: part.choice("share", ["y", "z"]), 'share="x": expected "y" or "z"'),
    ):
        with pytest.raises(ApiError) as error:
            read()
        assert error.value.message == f"messages[3].parts[0].{message}"
        assert error.value.param == error.value.message.replace("=", " ").split()[0]


def test_numbers_have_bounds() -> None:
    fields = JsonObject({"zero": 0, "half": 0.5, "big": 2**63, "huge": 1e300, "one": 1.0})
    assert fields.number("zero", low=0, high=1) == 0.0
    assert fields.number("half", low=0, high=1, above=True) == 0.5
    assert fields.number("one", low=0, high=1) == 1.0
    assert fields.integer("one", low=0, high=1) == 1
    for name in ("half", "big", "huge"):
        with pytest.raises(ApiError):
            fields.integer(name, low=0, high=2**63 - 1)
    with pytest.raises(ApiError):
        fields.number("zero", low=0, high=1, above=True)


def test_a_document_that_cannot_be_printed_again_is_refused() -> None:
    shallow: Json = {}
    deep: Json = {}
    for _ in range(200):
        shallow = {"a": shallow}
    for _ in range(300):
        deep = {"a": deep}
    fields = JsonObject({"shallow": shallow, "deep": deep})
    assert fields.document("shallow") == shallow
    with pytest.raises(ApiError, match="254 levels"):
        fields.document("deep")


def test_unknown_fields_are_refused_and_neutral_values_pass() -> None:
    JsonObject({"a": "anything", "b": None, "c": 0, "d": 0.0}).refuse_unknown({"a"}, {"c": (0, 1), "d": (0,)})
    refused_fields: list[tuple[dict[str, Json], str]] = [
        ({"b": 1}, "b=1 is not supported: leave it out"),
        ({"c": False}, "c=false is not supported: leave it out or send 0 or 1"),
        ({"c": 2}, "c=2 is not supported: leave it out or send 0 or 1"),
    ]
    for fields, message in refused_fields:
        with pytest.raises(ApiError) as error:
            JsonObject(fields).refuse_unknown({"a"}, {"c": (0, 1)})
        assert (error.value.code, error.value.message) == ("unsupported_parameter", message)


@given(JSON)
def test_quotes_are_short(value: Json) -> None:
    assert len(quote(value)) <= QUOTED_CHARACTERS
    orjson.dumps(quote(value))


def test_quotes_say_what_it_is() -> None:
    values: list[Json] = [None, True, 1.5, "a\n", [1, 2], {}, {"a": 1, "b": 2}]
    assert [quote(value) for value in values] == [
        *("null", "true", "1.5", '"a\\n"', "a list of 2", "an empty object", "an object of 2 (a, b)"),
    ]
    assert quote("x" * 100_000_000) == '"' + "x" * 78 + "…"


@given(st.text(min_size=100))
def test_names_are_cut_too(name: str) -> None:
    with pytest.raises(ApiError) as error:
        JsonObject({name: 1}).refuse_unknown(())
    assert len(error.value.message) < 3 * QUOTED_CHARACTERS
    assert len(error.value.param or "") <= QUOTED_CHARACTERS
