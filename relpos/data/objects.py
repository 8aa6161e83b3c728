# SPDX-License-Identifier: Apache-2.0
"""How a tokenizer of the user's own goes into the folder of a vocabulary, and comes out of it.

    subwords.tokenizer.json    one of Hugging Face's `tokenizers`, in that package's own format
    subwords.pickle            any other that can be pickled

Their names are ours alone: what else is in the folder is the user's, and stays.

A pickle is read where that is asked for and nowhere else: whoever wrote it decides what reading does.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from relpos.data.files import write_file

HUGGING_FACE, PICKLE = "subwords.tokenizer.json", "subwords.pickle"


def clear(folder: Path) -> None:
    """What another vocabulary has left goes."""
    for name in (HUGGING_FACE, PICKLE):
        (folder / name).unlink(missing_ok=True)


def store(folder: Path, tokenizer: Any) -> None:
    """Leaves nothing of an object that can be neither."""
    clear(folder)
    try:
        if _is_hugging_face(tokenizer):
            name, content = HUGGING_FACE, tokenizer.to_str().encode()
        else:
            name, content = PICKLE, pickle.dumps(tokenizer)
    except Exception:  # classes raise what they like, and that package of parts in Python
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / name, content)


def comes_alone(folder: Path) -> bool:
    """Is it read from the folder, and nobody need be asked?"""
    return (folder / HUGGING_FACE).is_file()


def fetch(folder: Path, unpickle: bool) -> Any:
    """What `store` has left, made again."""
    if comes_alone(folder):
        return _hugging_face(folder / HUGGING_FACE)
    path = folder / PICKLE
    if not path.is_file():
        raise ValueError(
            f"{folder}: the vocabulary was an object of your own, which is not in the folder: "
            "load_subwords(folder, tokenizer=...) takes it"
        )
    if not unpickle:
        raise ValueError(
            f"{path}: the vocabulary was an object of your own, pickled there, and reading it runs "
            "what whoever wrote it wants: where you trust them, load_subwords(folder, unpickle=True) "
            "reads it (of relpos translate: --unpickle); tokenizer=... takes the object instead"
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # as above, and files are cut, and classes not found
        raise ValueError(
            f"{path}: cannot be unpickled here: {type(error).__name__}: {error}; "
            "load_subwords(folder, tokenizer=...) takes the object"
        ) from error


def _is_hugging_face(tokenizer: Any) -> bool:
    package = sys.modules.get("tokenizers")  # whoever has such an object has imported it
    return package is not None and type(tokenizer) is package.Tokenizer


def _hugging_face(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError(
            f"{path}: to read it, pip install tokenizers: the vocabulary is one of that package"
        ) from None
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer of Hugging Face's: {error}") from None
