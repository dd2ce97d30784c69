"""The language of a text, by langdetect: 55 languages, the same answer in every process."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import needs_extra

if TYPE_CHECKING:
    from langdetect.detector_factory import DetectorFactory

LONGEST = 10_000  # characters that the detector reads


def language_of(text: str) -> str | None:
    """The code of a text's language, such as `en` or `zh-cn`; None where nothing in it tells."""
    detector = _detectors().create()
    from langdetect.lang_detect_exception import LangDetectException  # after it is known to be there

    detector.append(text[:LONGEST])
    try:
        return detector.detect()
    except LangDetectException:  # no letters, or none that it knows
        return None


def known_languages() -> list[str]:
    """The codes of the languages that are recognized: of ISO 639-1, and `zh-cn` and `zh-tw`."""
    return list(_detectors().langlist)


@cache
def _detectors() -> "DetectorFactory":
    with needs_extra("Telling languages apart", "data"):
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    # A factory of our own: langdetect samples from a seed that is a setting of the factory, and loads its profiles in
    # the order of the file system.
    factory = DetectorFactory()
    factory.set_seed(0)
    profiles = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith("."))
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    return factory
