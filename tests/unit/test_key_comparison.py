from etude.key_comparison import same_key


def test_a_key_is_its_own_and_no_other() -> None:
    assert same_key("sk-1", "sk-1")
    for other in ("", "sk-", "sk-12", "SK-1"):
        assert not same_key(other, "sk-1")


def test_bytes_that_are_no_text_are_a_wrong_key_and_no_error() -> None:
    given = b"sk-1\xff".decode(errors="surrogateescape")
    assert not same_key(given, "sk-1")
    assert same_key(given, given)
