"""The language of a text, the same on every machine and at every call."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import MissingExtra

if TYPE_CHECKING:
    from langdetect.detector_factory import DetectorFactory

LONGEST = 10_000  # characters that the detector reads


def language_of(text: str) -> str | None:
    """The code of a text's language, such as `en`; None where nothing in it tells."""
    detector = _detectors().create()
    from langdetect.lang_detect_exception import LangDetectException  # after it is known to be there

    detector.append(text[:LONGEST])
    try:
        return detector.detect()
    except LangDetectException:  # no letters, or none that it knows
        return None


def check_language(code: str) -> str:
    """The code of a language itself, if it can be told from others; a ValueError, for validation, if not."""
    known = _detectors().langlist
    if code not in known:
        raise ValueError(f"expected the code of a language, one of {', '.join(known)}")
    return code


@cache
def _detectors() -> "DetectorFactory":
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError as error:
        raise MissingExtra("Telling languages apart", "eval") from error
    # Our own, because its draws come from a seed that is a setting of the factory, and in the order of the names,
    # because its own is that of the file system.
    made = DetectorFactory()
    made.set_seed(0)
    profiles = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith("."))
    made.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    return made
