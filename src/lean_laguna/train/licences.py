"""Which distributions may be read as training text: permissive licences only, decided from metadata.

Not legal advice and not a scanner: a distribution whose metadata is silent, mixed or unclear is left out.
Source: PEP 639 (``License-Expression``), core metadata ``License`` and trove classifiers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PERMITTED_IDS = frozenset(
    {
        "MIT",
        "MIT-0",
        "BSD",
        "0BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "Apache-2.0",
        "PSF-2.0",
        "Python-2.0",
        "ISC",
    }
)

_CLASSIFIERS = {
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: MIT No Attribution License (MIT-0)": "MIT-0",
    "License :: OSI Approved :: BSD License": "BSD",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
}

# The free-text License field, lower case, without the words "the", "license", "licence", punctuation.
_FREE_TEXT = {
    "mit": "MIT",
    "mit expat": "MIT",
    "expat": "MIT",
    "bsd": "BSD",
    "new bsd": "BSD-3-Clause",
    "modified bsd": "BSD-3-Clause",
    "simplified bsd": "BSD-2-Clause",
    "bsd 2 clause": "BSD-2-Clause",
    "2 clause bsd": "BSD-2-Clause",
    "bsd 3 clause": "BSD-3-Clause",
    "3 clause bsd": "BSD-3-Clause",
    "bsd like": "BSD",
    "bsd style": "BSD",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2 0": "Apache-2.0",
    "apache v2": "Apache-2.0",
    "apache version 2 0": "Apache-2.0",
    "apache 2 0 version": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2 0": "Apache-2.0",
    "asl 2": "Apache-2.0",
    "psf": "PSF-2.0",
    "psf 2 0": "PSF-2.0",
    "psfl": "PSF-2.0",
    "python software foundation": "PSF-2.0",
    "isc": "ISC",
}

_COPYLEFT = re.compile(
    r"\b(?:a|l)?gpl|gnu (?:lesser |library |affero )?general public|mozilla public|\bmpl\b|\beupl\b|\bcddl\b"
    r"|non-?commercial|creative commons|\bcc[- ]by",
    re.IGNORECASE,
)


def classify_licence(expression: str | None, classifiers: Sequence[str], free_text: str | None) -> str | None:
    """Return the permissive licence that a distribution's metadata states, or None.

    Args:
        expression: ``License-Expression``, an SPDX expression.
        classifiers: All trove classifiers.
        free_text: The ``License`` field, a name or a whole licence text.

    Returns:
        SPDX ids joined by `` AND ``, or None where the licence is copyleft, mixed, unknown or unstated.
    """
    if expression:
        return _from_expression(expression)
    stated = [c for c in classifiers if c.startswith("License ::") and c != "License :: OSI Approved"]
    if stated:
        found = [_CLASSIFIERS.get(c) for c in stated]
        if any(f is None for f in found) or (free_text and _COPYLEFT.search(free_text[:400])):
            return None
        return " AND ".join(sorted({f for f in found if f}))
    return _from_free_text(free_text or "")


def mentions_copyleft(head: str) -> bool:
    """Say whether a source file's first lines name a copyleft or non-commercial licence."""
    return _COPYLEFT.search(head) is not None


def _from_expression(expression: str) -> str | None:
    """Every AND part must be permitted; of an OR, one alternative is enough. WITH and nesting are refused."""
    if re.search(r"\bWITH\b", expression, re.IGNORECASE):
        return None
    alternatives = re.split(r"\s+OR\s+", expression.strip(), flags=re.IGNORECASE)
    if len(alternatives) > 1 and re.search(r"\bAND\b", expression, re.IGNORECASE):
        return None  # a mix of AND and OR: rare, and not worth a parser
    for alternative in alternatives:
        ids = [part.strip(" ()") for part in re.split(r"\s+AND\s+", alternative, flags=re.IGNORECASE)]
        if all(i in PERMITTED_IDS for i in ids):
            return " AND ".join(sorted(set(ids)))
    return None


def _from_free_text(text: str) -> str | None:
    if not text.strip() or _COPYLEFT.search(text):
        return None
    if len(text) > 200:
        lowered = " ".join(text.lower().split())
        if "permission is hereby granted, free of charge" in lowered:
            return "MIT"
        if "redistribution and use in source and binary forms" in lowered:
            return "BSD"
        if "apache license" in lowered and "version 2.0" in lowered:
            return "Apache-2.0"
        return None
    if text.strip() in PERMITTED_IDS:
        return text.strip()
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return _FREE_TEXT.get(" ".join(w for w in words if w not in {"the", "license", "licence", "licensed"}))
