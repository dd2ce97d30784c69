"""Tokenizers: round trips, special tokens that never come out of text, streams, files, training, imports."""

import json
import os
import pickle
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.tokenizer_files import added_token, bpe_model
from palestra.data.tokenizers import (
    SPECIAL_TOKENS,
    Detokenizer,
    Tokenizer,
    character_tokenizer,
    from_gguf,
    from_llama2c,
    train_bpe,
)
from palestra.errors import UsageError

DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
CORPUS = [
    f"The {noun} of {number} said: “I can't see {number * 7} naïve {noun}s — 日本語 🎉!”\n\n    x = {number}\n"
    for noun in ("king", "queen", "carpenter", "theatre", "other")
    for number in range(40)
]
HARD = ["", " ", "\n\n  x", "1234567 ①²½", "don't DON'T", "a\r\nb\t\tc", "日本語 🎉👩‍👩‍👧 é e\u0301", "\x00\x7f\u2028"]

SPACED = "Keys, on Monday and  2/5 times\n\n1.A"  # spaces before digits: where SmolLM's rules differ from GPT-2's


def real(*parts: str) -> Path:
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} under PALESTRA_DATA")
    return path


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(CORPUS, 340)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.load(real("tokenizers", "smollm"))


@pytest.fixture(scope="module")
def llama2c() -> Tokenizer:
    return from_llama2c(real("weights_stories260K", "tok512.bin"), 512)


def in_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def document(model: dict[str, Any], specials: list[tuple[str, int]], **parts: Any) -> dict[str, Any]:
    """A tokenizer.json of SentencePiece's kind."""
    fuse = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    empty = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "truncation": None, "padding": None}
    added = [added_token(content, number) for content, number in specials]
    return {"version": "1.0", **empty, "decoder": fuse, "added_tokens": added, "model": model, **parts}


def hostile_tokenizers() -> dict[str, Tokenizer]:
    """Models that can reach a special token from its own characters: by merges, by whole words, by pieces."""
    specials = [("<s>", 0), ("</s>", 1)]
    letters = {c: 2 + index for index, c in enumerate("<>/s ab")}
    vocabulary = {"<s>": 0, "</s>": 1, **letters, "<s": 9, "</": 10, "s>": 11, "a</s>": 12}
    merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("s", ">"), ("</", "s>"), ("a", "</s>")]
    scored = [[piece, -1.0 if len(piece) > 1 else -5.0] for piece in vocabulary]
    unigram = {"type": "Unigram", "unk_id": None, "vocab": scored, "byte_fallback": False}
    whole = bpe_model(vocabulary, merges[:1], ignore_merges=True)
    models = {"merges": bpe_model(vocabulary, merges), "whole words": whole, "unigram": unigram}
    return {name: Tokenizer(document(model, specials), {}, name=name) for name, model in models.items()}


HOSTILE = hostile_tokenizers()


def sentencepiece_like(spaces: int = 1, **parts: Any) -> Tokenizer:
    """Llama 2's arrangement: ▁ for the space and before every text, bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab<>/s", "▁a", "ab", "▁ab", "▁▁"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "ab"), ("▁", "▁")]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": spaces, "stop": 0}
    decoder = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    model = bpe_model(
        {piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    specials = [("<unk>", 0), ("<s>", 1), ("</s>", 2)]
    written = document(model, specials, **{"decoder": decoder, "normalizer": normalizer, **parts})
    return Tokenizer(written, {"bos_token": "<s>", "eos_token": "</s>"}, name="sentencepiece")


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
SENTENCEPIECE = {
    "prepended": sentencepiece_like(),
    "metaspace": sentencepiece_like(normalizer=None, pre_tokenizer=METASPACE),
}


def with_specials(strings: tuple[str, ...], others: str) -> st.SearchStrategy[str]:
    """Texts full of special strings, halves of them and overlaps."""
    halves = [string[:cut] for string in strings for cut in range(1, len(string))]
    halves += [string[cut:] for string in strings for cut in range(1, len(string))]
    pieces = st.one_of(st.sampled_from(strings), st.sampled_from(halves), st.text(others, max_size=3))
    return st.lists(pieces, max_size=12).map("".join)


@given(text=st.text())
def test_round_trip_any_text_is_kept_by_bpe(bpe: Tokenizer, text: str):
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["C"])))  # its vocabulary lacks some control characters
def test_round_trip_printable_text_is_kept_by_smollm(smollm: Tokenizer, text: str):
    assert smollm.decode(smollm.encode(text)) == text


@settings(max_examples=50)
@given(text=st.text())
def test_round_trip_any_text_is_kept_by_llama2c(llama2c: Tokenizer, text: str):
    assert llama2c.decode(llama2c.encode(text)) == text


@given(text=st.text("abc \n❤<|>"))
def test_round_trip_text_over_the_alphabet_is_kept_by_characters(text: str):
    tokenizer = character_tokenizer("abc \n❤<|>")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@given(text=with_specials(SPECIAL_TOKENS, "<|>é "))
def test_encode_special_strings_in_text_stay_text(bpe: Tokenizer, text: str):
    ids = bpe.encode(text)
    assert bpe.special_ids.isdisjoint(ids)
    assert bpe.decode(ids) == text
    assert bpe.encode_all([text]) == [ids]


@pytest.mark.parametrize("name", HOSTILE)
@settings(max_examples=60)
@given(text=with_specials(("<s>", "</s>"), "<>/s ab"))
def test_encode_model_that_can_spell_specials_never_gives_them(name: str, text: str):
    tokenizer = HOSTILE[name]
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=60)
@given(text=with_specials(("<s>", "</s>"), " abé🎉\n"), special=st.booleans())
def test_sentencepiece_like_ids_and_text_equal_the_library(name: str, text: str, special: bool):
    tokenizer = SENTENCEPIECE[name]
    plain = tokenizers.Tokenizer.from_str(tokenizer._serialized)
    plain.encode_special_tokens = not special
    ids = tokenizer.encode(text, specials=special)
    assert ids == plain.encode(text).ids
    assert tokenizer.decode(ids, specials=True) == plain.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == plain.decode(ids)
    if not special and not text.startswith(" "):  # Metaspace puts no space before one
        assert tokenizer.decode(ids) == text


def test_decode_more_leading_spaces_are_taken_as_the_library_does():
    tokenizer = sentencepiece_like(spaces=2)
    plain = tokenizers.Tokenizer.from_str(tokenizer._serialized)
    for text in ("a", " a", "  a", "   a", " ", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == plain.decode(ids)


def test_hostile_models_without_protection_do_give_specials():
    # What the test above protects from: the library itself, told to take special strings as text, gives them.
    for name, tokenizer in HOSTILE.items():
        plain = tokenizers.Tokenizer.from_str(tokenizer._serialized)
        plain.encode_special_tokens = True
        assert 1 in plain.encode("</s>").ids, name


@settings(max_examples=60)
@given(text=with_specials(SPECIAL_TOKENS, "<|>é "))
def test_encode_with_specials_equals_the_library(bpe: Tokenizer, text: str):
    plain = tokenizers.Tokenizer.from_str(bpe._serialized)
    assert bpe.encode(text, specials=True) == plain.encode(text, add_special_tokens=False).ids


def test_encode_with_specials_flags_of_added_tokens_equal_the_library():
    specials = [("<s>", 0), ("</s>", 1), ("<s></s>", 2)]
    vocabulary = {"<s>": 0, "</s>": 1, "<s></s>": 2, **{c: 3 + i for i, c in enumerate("<>/s abc")}}
    written = document(bpe_model(vocabulary, []), specials)
    written["added_tokens"][0] |= {"lstrip": True, "rstrip": True}
    written["added_tokens"][1] |= {"single_word": True}
    written["added_tokens"].append(added_token("><", len(vocabulary), special=False))
    tokenizer, plain = Tokenizer(written, {}, name="flags"), tokenizers.Tokenizer.from_str(json.dumps(written))
    for text in ("a <s> b", "a</s>b", "a </s> b", "<s></s>", "a><s>", "<s><s></s></s>", "<</s>>"):
        assert tokenizer.encode(text, specials=True) == plain.encode(text).ids, text
    assert tokenizer.encode("><") == [len(vocabulary)]  # added but not special: found in any text


def test_encode_parts_specials_count_only_where_said_and_not_across_borders(bpe: Tokenizer):
    end = bpe.encode("<|im_end|>", specials=True)
    parts = [("<|im_end|>", False), ("<|im_end|>", True), ("<|im_", True), ("end|>", True)]
    ids, places = bpe.encode_parts(parts)
    assert [token in bpe.special_ids for token in ids].count(True) == 1
    assert places[ids.index(end[0])] == (10, 20)
    assert bpe.decode(ids, specials=True) == "".join(text for text, _ in parts)


@settings(max_examples=60)
@given(text=with_specials(SPECIAL_TOKENS, "abc é🎉"))
def test_encode_parts_places_are_the_characters_of_each_token(bpe: Tokenizer, text: str):
    ids, places = bpe.encode_parts([(text, True)])
    for token, (start, end) in zip(ids, places, strict=True):
        assert bpe.piece(token) in text[start:end].encode()
    assert sorted(set().union(*(range(*place) for place in places))) == list(range(len(text)))


def test_encode_half_a_surrogate_pair_is_refused(bpe: Tokenizer):
    for call in (bpe.encode, lambda text: bpe.encode(text, specials=True), lambda text: bpe.encode_all([text])):
        with pytest.raises(UsageError, match="character 1 is half a surrogate"):
            call("a\ud83d")


def test_encode_all_many_texts_equals_one_by_one(smollm: Tokenizer):
    texts = [*CORPUS, *HARD]
    assert smollm.encode_all(texts) == [smollm.encode(text) for text in texts]


def test_load_truncation_and_padding_in_the_file_do_nothing(smollm: Tokenizer):
    # The file asks for 192 tokens, cut or filled up.
    assert len(smollm.encode("a")) == 1
    assert len(smollm.encode("word " * 500)) > 500


def test_load_smollm_special_tokens_are_those_of_its_config(smollm: Tokenizer):
    assert (smollm.bos, smollm.eos, smollm.pad) == (0, 0, 49152)
    assert smollm.special_ids == {*range(17), 49152}
    assert smollm.vocab_size == 49153
    assert smollm.name == "smollm"


def test_load_vocabulary_and_merges_equals_the_library():
    folder = real("tokenizers", "gpt2")
    ours = Tokenizer.load(folder)
    theirs = tokenizers.ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    for text in [*HARD, *CORPUS[:5]]:
        assert ours.encode(text) == theirs.encode(text).ids
    assert (ours.vocab_size, ours.eos, ours.bos) == (50257, 50256, 50256)


def saved_for(kind: str, request: pytest.FixtureRequest) -> Tokenizer:
    if kind == "characters":
        return character_tokenizer("".join(CORPUS + HARD + list(SPACED)))
    return request.getfixturevalue(kind)


# transformers reads a folder without a model's config in one way and, by the model's type, in others. (For type qwen2
# it puts Qwen's rules over any tokenizer.json, whatever the folder says.)
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(("bpe", kind) for kind in (None, "mistral", "mixtral", "qwen3", "qwen3_moe", "olmoe")),
        *((name, "llama") for name in ("bpe", "characters", "smollm", "llama2c")),
    ],
)
def test_save_folder_gives_the_same_ids_in_transformers(
    kind: str, model_type: str | None, request: pytest.FixtureRequest, tmp_path: Path
):
    tokenizer = saved_for(kind, request)
    tokenizer.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again, theirs = Tokenizer.load(tmp_path), in_transformers(tmp_path)
    for text in [*HARD, *CORPUS[:10], SPACED]:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids
    for string in tokenizer.special_strings:
        text = f"King{string}king"
        ids = tokenizer.encode(text, specials=True)
        assert again.encode(text, specials=True) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (again.bos, again.eos, again.pad)
    assert (again.bos, again.eos, again.pad) == (tokenizer.bos, tokenizer.eos, tokenizer.pad)
    assert (again.vocab_size, len(theirs)) == (tokenizer.vocab_size, tokenizer.vocab_size)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.special_ids == tokenizer.special_ids
    assert again.chat_template == tokenizer.chat_template == theirs.chat_template


def test_save_what_is_not_understood_survives(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path / "a")
    path = tmp_path / "a" / "tokenizer_config.json"
    extra = {"model_max_length": 77, "something_new": {"deep": [1, None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    Tokenizer.load(tmp_path / "a").save(tmp_path / "b")
    assert extra.items() <= json.loads((tmp_path / "b" / "tokenizer_config.json").read_text()).items()


def test_save_another_chat_template_goes_before_the_one_in_the_config(bpe: Tokenizer, tmp_path: Path):
    changed = bpe.with_chat_template("{{ messages[0]['content'] }}")
    changed.save(tmp_path)
    assert Tokenizer.load(tmp_path).chat_template == changed.chat_template != bpe.chat_template
    assert in_transformers(tmp_path).chat_template == changed.chat_template


def test_load_templates_in_a_list_takes_the_default(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))
    assert Tokenizer.load(tmp_path).chat_template == "D"


def test_load_special_tokens_map_is_read_where_the_config_is_silent(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    record = {"content": "<|endoftext|>", "lstrip": False}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": record, "bos_token": record}))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.eos, loaded.bos, loaded.pad) == (2, 0, None)


def test_load_token_that_the_config_alone_calls_special_is_special(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    plain = json.loads(path.read_text())
    plain["added_tokens"] = [entry | {"special": False} for entry in plain["added_tokens"][:2]]
    path.write_text(json.dumps(plain))
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"340": {"content": "<new>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.special_ids == {2, 340}
    assert loaded.encode("<|im_end|><new><|im_start|>", specials=True) == [2, 340, 1]
    assert {2, 340}.isdisjoint(loaded.encode("<|im_end|><new>"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither tokenizer.json nor vocab.json with merges.txt"),
        ({"vocab.json": "{}"}, "neither tokenizer.json"),
        (
            {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "OddTokenizer"}'},
            "OddTokenizer",
        ),
        ({"tokenizer.json": "{"}, "not valid JSON"),
        ({"tokenizer.json": "{}"}, "no 'model'"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}'}, "not understood"),
    ],
)
def test_load_incomplete_folder_says_what_is_missing(files: dict[str, str], message: str, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        Tokenizer.load(tmp_path)


def test_load_named_token_without_an_id_is_refused(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</none>"}')
    with pytest.raises(UsageError, match="</none>"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_load_decoder_that_cannot_stream_is_refused_by_name(decoder: dict[str, Any] | None):
    written = document(bpe_model({"a": 0}, []), [], decoder=decoder)
    with pytest.raises(UsageError, match="WordPiece" if decoder else "none"):
        Tokenizer(written, {}, name="odd")


def test_load_added_tokens_with_a_gap_are_refused():
    written = document(bpe_model({"a": 0}, []), [("<s>", 7)])
    with pytest.raises(UsageError, match="'<s>' is listed with the id 7 but gets 1"):
        Tokenizer(written, {}, name="gap")


@given(data=st.data())
def test_detokenizer_any_ids_in_any_pushes_equal_decode(bpe: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size + 3)))
    specials = data.draw(st.booleans())
    check_stream(bpe, ids, data, specials)
    assert bpe.decode(ids) == tokenizers.Tokenizer.from_str(bpe._serialized).decode(ids)


@given(data=st.data())
def test_detokenizer_position_dependent_decoder_equals_decode(llama2c: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.one_of(st.integers(0, 2), st.integers(3, 511), st.sampled_from([259 + 32, 420]))))
    check_stream(llama2c, ids, data, data.draw(st.booleans()))


def check_stream(tokenizer: Tokenizer, ids: list[int], data: st.DataObject, specials: bool) -> None:
    continues = data.draw(st.booleans())
    stream = Detokenizer(tokenizer, specials=specials, continues=continues)
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.push(rest[:size])
        rest = rest[size:]
        # What was given is final: whatever follows, the whole begins with it.
        assert tokenizer.decode(ids, specials=specials, continues=continues).startswith(text)
    assert text + stream.finish() == tokenizer.decode(ids, specials=specials, continues=continues)


def test_detokenizer_character_of_many_tokens_comes_whole(bpe: Tokenizer):
    ids = bpe.encode("ß🦖")
    assert len(ids) == 5
    stream = Detokenizer(bpe)
    assert [stream.push([token]) for token in ids] == ["", "ß", "", "", "🦖"]
    stream.push(ids[2:4])
    assert stream.finish() == "\ufffd"


def test_detokenizer_long_stream_reads_each_token_once(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    class Pieces(dict):
        def __missing__(self, token: int) -> bytes:
            asked.append(token)
            return b"x"

    monkeypatch.setattr(bpe, "_pieces", Pieces())
    stream = Detokenizer(bpe)
    for _ in range(1000):
        stream.push([65])
    assert len(asked) == 1000


def test_decode_leading_space_is_kept_where_the_text_continues(llama2c: Tokenizer):
    ids = llama2c.encode("Once upon a time")
    assert llama2c.decode(ids) == "Once upon a time"
    assert llama2c.decode(ids[:2]) + llama2c.decode(ids[2:], continues=True) == "Once upon a time"
    assert llama2c.decode([1, *ids]) == "Once upon a time"


@settings(max_examples=50)
@given(text=st.text())
def test_piece_bytes_of_all_tokens_are_the_bytes_of_the_text(bpe: Tokenizer, llama2c: Tokenizer, text: str):
    assert b"".join(map(bpe.piece, bpe.encode(text))) == text.encode()
    assert b"".join(map(llama2c.piece, llama2c.encode(text))) == (b" " + text.encode() if text else b"")


def test_piece_special_added_and_absent_ids(bpe: Tokenizer):
    assert bpe.piece(0) == b"<|endoftext|>"
    assert bpe.piece(bpe.vocab_size) == b""
    written = document(
        bpe_model({"a": 0}, []),
        [],
        decoder={"type": "ByteLevel"} | dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True),
    )
    written["added_tokens"] = [added_token("naïve", 1, special=False)]
    assert Tokenizer(written, {}, name="added").piece(1) == "naïve".encode()  # not a byte's printed form


def test_fingerprint_tells_tokenizers_apart_and_passes_over_truncation(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut}, indent=1))
    assert Tokenizer.load(tmp_path).fingerprint == bpe.fingerprint
    assert train_bpe(CORPUS, 339).fingerprint != bpe.fingerprint


def test_pickle_tokenizer_gives_the_same_ids(bpe: Tokenizer):
    again = pickle.loads(pickle.dumps(bpe))
    text = "the king<|im_end|>"
    assert again.encode(text) == bpe.encode(text)
    assert again.encode(text, specials=True) == bpe.encode(text, specials=True)


def test_train_bpe_in_another_process_with_one_thread_is_the_same(bpe: Tokenizer, tmp_path: Path):
    (tmp_path / "corpus.json").write_text(json.dumps(CORPUS))
    program = (
        "import json, sys; from palestra.data.tokenizers import train_bpe;"
        "print(train_bpe(json.load(open(sys.argv[1])), 340).fingerprint)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "corpus.json")]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == bpe.fingerprint


def test_train_bpe_learns_words_and_cuts_digits_in_pairs(bpe: Tokenizer):
    assert bpe.vocab_size == 340
    assert (bpe.eos, bpe.bos, bpe.pad) == (0, 0, None)
    assert bpe.special_strings == SPECIAL_TOKENS
    assert len(bpe.encode(" the carpenter")) <= 3
    assert max(len(bpe.piece(token)) for token in range(340) if bpe.piece(token).isdigit()) == 2


def test_train_bpe_other_special_tokens_get_no_chatml_template():
    made = train_bpe(CORPUS, 300, special_tokens=("<eos>",))
    assert (made.eos, made.special_strings, made.chat_template) == (0, ("<eos>",), None)


def test_train_bpe_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(UsageError, match="take 259"):
        train_bpe(CORPUS, 258)


def test_character_tokenizer_ids_are_the_sorted_alphabet_then_specials():
    tokenizer = character_tokenizer(["hello", "world"])
    assert tokenizer.encode("dehlorw") == list(range(7))
    assert tokenizer.encode("".join(SPECIAL_TOKENS), specials=True) == [7, 8, 9]
    assert (tokenizer.vocab_size, tokenizer.eos) == (10, 7)
    assert tokenizer.fingerprint == character_tokenizer("hellworld").fingerprint


def test_character_tokenizer_unknown_character_is_named():
    tokenizer = character_tokenizer("abc<")
    for call in (tokenizer.encode, lambda text: tokenizer.encode(text + "<|im_end|>", specials=True)):
        with pytest.raises(UsageError, match="no token for 'é', 'ü'"):
            call("aüéb")


def reference_llama2c(path: Path, text: str) -> list[int]:
    """llama2.c's `encode`, written from its description: look up characters, then merge the best-scored neighbors."""
    data = path.read_bytes()
    pieces: list[bytes] = []
    scores: list[float] = []
    place = 4
    while place < len(data):
        score, length = struct.unpack_from("<fi", data, place)
        pieces.append(data[place + 8 : place + 8 + length])
        scores.append(score)
        place += 8 + length
    numbers = {piece: number for number, piece in enumerate(pieces)}
    ids = [numbers[b" "]] if text else []
    for character in text:
        found = numbers.get(character.encode())
        ids += [byte + 3 for byte in character.encode()] if found is None else [found]
    while True:
        joined = [numbers.get(pieces[a] + pieces[b]) for a, b in pairwise(ids)]
        ranked = [(scores[number], -index, number) for index, number in enumerate(joined) if number is not None]
        if not ranked:
            return ids
        _, index, number = max(ranked)
        ids[-index : -index + 2] = [number]


@settings(max_examples=150)
@given(text=st.one_of(st.text(), st.text("the and.\nT,", max_size=60), with_specials(("<s>", "<0x0A>"), "▁ a\n")))
def test_llama2c_ids_equal_the_reference_algorithm(llama2c: Tokenizer, text: str):
    path = real("weights_stories260K", "tok512.bin")
    assert llama2c.encode(text) == reference_llama2c(path, text)


def test_llama2c_real_text_equals_the_reference_algorithm(llama2c: Tokenizer):
    path = real("weights_stories260K", "tok512.bin")
    text = real("tinyshakespeare", "input.txt").read_text()
    for start in range(0, 200_000, 10_000):
        assert llama2c.encode(text[start : start + 150]) == reference_llama2c(path, text[start : start + 150])
    assert (llama2c.bos, llama2c.eos) == (1, 2)


@pytest.mark.parametrize("size", [511, 513])
def test_llama2c_wrong_size_is_refused(size: int):
    with pytest.raises(UsageError, match=str(size)):
        from_llama2c(real("weights_stories260K", "tok512.bin"), size)


def gguf_fields(source: Tokenizer, pre: str) -> dict[str, Any]:
    written = json.loads(source._serialized)
    vocabulary = {number: token for token, number in written["model"]["vocab"].items()}
    return {
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [vocabulary[number] for number in range(len(vocabulary))],
        "tokenizer.ggml.token_type": [3 if number in source.special_ids else 1 for number in range(len(vocabulary))],
        "tokenizer.ggml.merges": [
            " ".join(pair) if isinstance(pair, list) else pair for pair in written["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_gguf_smollm_equals_its_tokenizer_json_token_for_token(smollm: Tokenizer):
    tokenizer = from_gguf(gguf_fields(smollm, "smollm"))
    texts = [*HARD, *CORPUS]
    for parts in (("tinyshakespeare", "input.txt"), ("gsm8k", "test.jsonl"), ("humaneval", "HumanEval.jsonl")):
        if DATA.joinpath(*parts).exists():
            texts.append(DATA.joinpath(*parts).read_text()[:50_000])
    assert tokenizer.encode_all(texts) == smollm.encode_all(texts)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.name) == (1, 2, "Tiny")
    assert (tokenizer.chat_template, tokenizer.vocab_size) == ("{{ messages }}", 49152)
    assert tokenizer.special_ids == set(range(17))


def test_gguf_qwen2_equals_transformers(bpe: Tokenizer):
    from transformers import Qwen2Tokenizer

    fields = gguf_fields(bpe, "qwen2")
    written = json.loads(bpe._serialized)["model"]
    merges: Any = [tuple(pair) for pair in written["merges"]]
    theirs = Qwen2Tokenizer(vocab=written["vocab"], merges=merges)
    ours = from_gguf(fields)
    for text in [*HARD, *CORPUS]:
        assert ours.encode(text) == theirs.encode(text), text


def test_gguf_llama_bpe_cuts_digits_in_threes_and_takes_whole_words(bpe: Tokenizer):
    fields = gguf_fields(bpe, "llama-bpe")
    fields["tokenizer.ggml.tokens"] += ["123", "456", "1234", "zebrafish"]
    fields["tokenizer.ggml.token_type"] += [1, 1, 1, 4]
    ours = from_gguf(fields)
    assert [ours.piece(token) for token in ours.encode("123456")] == [b"123", b"456"]
    assert ours.encode("zebrafish") == [343]
    assert 343 not in ours.special_ids


@pytest.mark.parametrize(
    ("change", "message"), [({"pre": "dolphin-9"}, "dolphin-9.*known are gpt-2, smollm"), ({"model": "rwkv"}, "rwkv")]
)
def test_gguf_unknown_kind_is_refused_by_name(bpe: Tokenizer, change: dict[str, str], message: str):
    fields = gguf_fields(bpe, "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(UsageError, match=message):
        from_gguf(fields)


def _with_bos(folder: Path, processor: object) -> Tokenizer:
    made = train_bpe(["abc"], 300, special_tokens=("<|endoftext|>", "<|begin|>"))
    made.save(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"] = processor
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return Tokenizer.load(folder)


def test_beginning_of_a_plain_text_is_what_transformers_puts_there(tmp_path):
    from transformers import AutoTokenizer

    bos = train_bpe(["abc"], 300, special_tokens=("<|endoftext|>", "<|begin|>")).encode("<|begin|>", specials=True)[0]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [bos], "tokens": ["<|begin|>"]}},
    }
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    for index, processor in enumerate((template, {"type": "Sequence", "processors": [plain, template]}, plain, None)):
        tokenizer = _with_bos(tmp_path / str(index), processor)
        theirs = AutoTokenizer.from_pretrained(tmp_path / str(index)).encode("cab")
        assert tokenizer.encode_prompt("cab") == theirs
        assert tokenizer.beginning == ((bos,) if index < 2 else ())
    assert tokenizer.encode_prompt("") == [tokenizer.eos]
