"""The classifier learns, keeps what it tests apart, is the same however it was run, and its scores are a softmax."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from palestra.data.steps import classify as module
from palestra.data.steps.classify import classify, features, load_classifier, train_classifier
from palestra.data.steps.shards import sources
from palestra.errors import UsageError

DATA = Path(os.environ.get("PALESTRA_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")


def write_class(path: Path, words: str, rows: int, seed: int) -> Path:
    """Documents of random words of a class, half of them common to all classes."""
    random = np.random.default_rng(seed)
    vocabulary = [*words.split(), "one", "two", "three", "four", "five", "six"]
    texts = [" ".join(random.choice(vocabulary, 12)) for _ in range(rows)]
    path.write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of three classes."""
    folder = tmp_path_factory.mktemp("classes")
    names = {"fruit": "apple pear plum fig", "metal": "iron zinc lead tin", "bird": "crow owl hen duck"}
    paths = {
        name: write_class(folder / f"{name}.jsonl", words, 200, n) for n, (name, words) in enumerate(names.items())
    }
    train_classifier(folder / "model", classes=paths, buckets=1 << 12, workers=1)
    return folder / "model"


def test_classifier_of_separable_classes_is_right_on_what_was_held_out(model: Path) -> None:
    counts = json.loads((model / "counts.json").read_text())
    assert counts["accuracy"] > 0.97
    confusion = np.array(counts["confusion"])
    assert confusion.shape == (3, 3)
    assert confusion.sum() == counts["held_out"]
    assert 30 < counts["held_out"] < 90
    assert not list((model / ".shards").glob("features*"))


def test_classifier_scores_are_the_softmax_of_the_weights(model: Path) -> None:
    classifier = load_classifier(str(model))
    text = "apple iron apple zinc"
    buckets, values = features(text, 2, 1 << 12)
    logits = np.array(
        [sum(classifier.weights[b, k] * v for b, v in zip(buckets, values, strict=True)) for k in range(3)]
    )
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(classifier.scores(text), expected, rtol=1e-5)
    assert np.isclose(np.square(values[:-1]).sum(), 1)
    assert len(features("", 2, 1 << 12)[0]) == 1


def test_classifier_trained_twice_or_in_two_goes_has_the_same_weights(model: Path, tmp_path: Path) -> None:
    classes = {name: model.parent / f"{name}.jsonl" for name in ("fruit", "metal", "bird")}
    # As a kill after the second epoch leaves it: the features, and the state of two epochs.
    half = tmp_path / "half"
    two = tmp_path / "two"
    train_classifier(two, classes=classes, buckets=1 << 12, epochs=2, workers=1)
    hyper = module._Hyper(tuple(classes), 2, 1 << 12, 5, 0.5, 0.1, 0)
    for label, path in enumerate(classes.values()):
        (source,) = sources(path)
        module._extract(half / f".shards/features-{label}", hyper, label, "text", source)
    corpus = module._Corpus(half / ".shards/features", [half / f".shards/features-{n}/00000.npz" for n in range(3)])
    stopped = module._train(half, dataclasses.replace(hyper, epochs=2), corpus)
    np.testing.assert_array_equal(stopped, np.load(two / "weights.npy"))
    train_classifier(half, classes=classes, buckets=1 << 12, workers=2)
    np.testing.assert_array_equal(np.load(half / "weights.npy"), np.load(model / "weights.npy"))


def test_classify_writes_scores_and_leaves_out_what_is_below_the_bound(model: Path, tmp_path: Path) -> None:
    source = model.parent / "bird.jsonl"
    classify(tmp_path / "all", source=source, model=model, workers=1)
    rows = [row for one in sources(tmp_path / "all") for _, _, row in one.rows()]
    assert len(rows) == 200
    assert all(abs(sum(row["scores"].values()) - 1) < 1e-5 for row in rows)
    classify(tmp_path / "fruit", source=source, model=model, keep="fruit", threshold=0.9, workers=1)
    counts = json.loads((tmp_path / "fruit/counts.json").read_text())
    expected = sum(row["scores"]["fruit"] < 0.9 for row in rows)
    assert counts["dropped"] == {"fruit below 0.9": expected}
    assert expected > 190
    with pytest.raises(UsageError, match="'fish' is not a class"):
        classify(tmp_path / "bad", source=source, model=model, keep="fish", workers=1)
    with pytest.raises(UsageError, match="is not a classifier"):
        classify(tmp_path / "bad", source=source, model=tmp_path, workers=1)


def test_train_classifier_leaves_out_and_counts_texts_that_are_not_unicode(tmp_path: Path) -> None:
    paths = {name: write_class(tmp_path / f"{name}.jsonl", name, 20, 0) for name in ("good", "bad")}
    with paths["bad"].open("a") as file:
        file.write(json.dumps({"text": "half \ud800 a pair"}) + "\n" + json.dumps({"text": None}) + "\n")
    train_classifier(tmp_path / "out", classes=paths, buckets=64, epochs=1, workers=1)
    said = json.loads((tmp_path / "out/counts.json").read_text())
    assert (said["rows_in"], said["dropped"]) == (42, {"no text": 1, "not valid Unicode": 1})


def test_train_classifier_of_one_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least two"):
        train_classifier(tmp_path / "out", classes={"only": tmp_path})


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared data (PALESTRA_DATA)")
def test_classifier_tells_paragraphs_of_two_novels_apart(tmp_path: Path) -> None:
    classes = {"dracula": "Dracula_345.txt", "pride": "Pride-and-Prejudice_1342.txt"}
    train_classifier(
        tmp_path / "out",
        classes={name: DATA / "gutenberg" / file for name, file in classes.items()},
        split="\n\n",
        epochs=2,
        buckets=1 << 16,
        workers=1,
    )
    assert json.loads((tmp_path / "out/counts.json").read_text())["accuracy"] > 0.8
