"""Comparison of the API keys that HTTP requests carry."""

import hmac


def same_key(given: str, expected: str) -> bool:
    """Compare a key from a request with the expected one, in constant time.

    A header may have bytes that are no UTF-8: aiohttp decodes them to surrogates, which :mod:`hmac` refuses as text.
    """
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode(errors="surrogateescape"))
