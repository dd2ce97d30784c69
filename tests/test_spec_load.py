"""Loading: files, collections, extends, variables, overrides, origins, round trips."""

import subprocess
import sys
from pathlib import Path

import pytest
from example_specs import FILES, ROOT, specs_of
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec, PPOSpec
from palestra.spec.load import load, spec_hash, to_yaml
from palestra.spec.model import Cadence, plain
from palestra.spec.validate import SpecError

MINIMAL = {
    "kind": "control",
    "name": "x",
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "train": {"frames": 1000},
}
BODY = "kind: control\nenv: {id: CartPole-v1}\nalgorithm: {name: ppo}\ntrain: {frames: 2e5}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into an empty working folder, so that messages name them shortly."""
    monkeypatch.chdir(tmp_path)

    def write_files(**files):
        for name, text in files.items():
            path = Path(name.replace("__", "/") + ".yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write_files


# --- files and collections


def test_examples_are_there():
    assert ROOT / "examples/control/ppo_cartpole.yaml" in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_loads(path):
    assert specs_of(path)
    for source, variables in specs_of(path).items():
        spec = load(source, variables=variables).spec
        assert load(spec).spec == spec


def test_example_of_cartpole_fits_in_20_lines():
    assert len((ROOT / "examples/control/ppo_cartpole.yaml").read_text().splitlines()) <= 20


def test_file_name_defaults_to_its_stem_and_numbers_with_exponents_are_whole(write):
    write(cart=BODY)
    loaded = load("cart.yaml")
    assert isinstance(loaded.spec, ControlSpec)
    assert loaded.spec.name == "cart"
    assert loaded.spec.train.frames == 200_000
    assert loaded.origin("name") == "default"
    assert loaded.origin("train.frames") == "cart.yaml:4"
    assert loaded.origin("algorithm.lr") == "default"


def test_collection_named_spec_is_picked_and_named_by_its_key(write):
    write(many="_base: &base\n  kind: control\n  env: {id: A}\n  algorithm: {name: ppo}\n"
          "one: {<<: *base, train: {frames: 1}}\ntwo:\n  <<: *base\n  train: {frames: 2}\n")  # fmt: skip
    assert load("many.yaml:two").spec.train.frames == 2
    assert load("many.yaml:two").spec.name == "two"
    assert load("many.yaml:two").origin("env.id") == "many.yaml:3"
    with pytest.raises(UsageError, match=r"(?s)holds 2 specs.*many.yaml:one.*many.yaml:two"):
        load("many.yaml")
    with pytest.raises(UsageError, match="Did you mean 'two'"):
        load("many.yaml:twoo")
    with pytest.raises(UsageError, match="holds no spec '_base'"):
        load("many.yaml:_base")


def test_collection_of_one_needs_no_name(write):
    write(one="only:\n" + "".join(f"  {line}\n" for line in BODY.splitlines()))
    assert load("one.yaml").spec.name == "only"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no spec"),
        ("- 1\n", "holds no spec"),
        ("env: {id: A}\nseed: 3\n", "bad.yaml:2: a spec needs a key 'kind'"),
    ],
)
def test_file_without_a_spec_says_what_a_spec_is(write, text, words):
    write(bad=text)
    with pytest.raises(UsageError, match=words):
        load("bad.yaml")


def test_name_of_a_file_with_one_spec_is_refused(write):
    write(cart=BODY)
    with pytest.raises(UsageError, match="holds one spec"):
        load("cart.yaml:cart")


def test_source_of_another_type_is_refused():
    with pytest.raises(UsageError, match="a spec is a file"):
        load(3)  # pyrefly: ignore


# --- extends


def test_extends_merges_mappings_and_replaces_the_rest(write):
    write(
        bases__a=BODY + "name: a\nnet: {hidden: [8, 8], activation: relu}\nseed: 1\n",
        child="extends: bases/a.yaml\nnet: {hidden: [4]}\ntrain: {frames: 7}\n",
    )
    loaded = load("child.yaml")
    assert loaded.spec.name == "child"  # a name is identity: it is not inherited
    assert plain(loaded.spec)["net"]["hidden"] == [4]
    assert plain(loaded.spec)["net"]["activation"] == "relu"
    assert loaded.spec.seed == 1
    assert loaded.origin("net.hidden") == "child.yaml:2"
    assert loaded.origin("net.hidden.0") == "child.yaml:2"
    assert loaded.origin("net.activation") == "bases/a.yaml:6"
    assert "extends" not in loaded.data


def test_extends_list_later_wins_and_chains_are_relative_to_each_file(write):
    write(
        deep__base=BODY + "seed: 1\nmax_session: 1\n",
        deep__mid="extends: base.yaml\nmax_session: 2\n",
        other="tweak: {extends: deep/mid.yaml, seed: 3}\n",
        child="extends: [deep/mid.yaml, other.yaml:tweak]\nmax_session: 5\n",
    )
    spec = load("child.yaml").spec
    assert (spec.seed, spec.max_session) == (3, 5)


def test_extends_same_file_by_name(write):
    indented = "".join(f"  {line}\n" for line in BODY.splitlines())
    write(many=f"a:\n{indented}b:\n  extends: :a\n  seed: 4\n")
    spec = load("many.yaml:b").spec
    assert (spec.name, spec.seed) == ("b", 4)


def test_extends_scalar_over_mapping_forgets_the_lines_below(write):
    write(
        base=BODY + "net:\n  hidden: [8]\n",
        child="extends: base.yaml\nalgorithm:\n  lr: {shape: linear, start: 1e-3}\n",
        grandchild="extends: child.yaml\nalgorithm: {lr: 5e-4}\nnet: null\n",
    )
    with pytest.raises(SpecError, match=r"grandchild.yaml:3  net: expected a mapping, got null"):
        load("grandchild.yaml")
    loaded = load("grandchild.yaml", overrides=["net={}"])
    assert loaded.origin("algorithm.lr") == "grandchild.yaml:2"
    assert ("algorithm", "lr", "shape") not in loaded.origins


def test_extends_cycle_names_the_chain(write):
    write(a="extends: b.yaml\n", b="extends: many.yaml:c\n", many="c: {extends: a.yaml}\n")
    with pytest.raises(UsageError, match=r"circle: a.yaml → b.yaml → many.yaml:c → a.yaml"):
        load("a.yaml")
    write(me="extends: me.yaml\n")
    with pytest.raises(UsageError, match=r"circle: me.yaml → me.yaml"):
        load("me.yaml")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("none.yaml", "child.yaml:1: 'extends' names none.yaml, and there is no such file"),
        ("3", "child.yaml:1: 'extends' takes a file"),
        ("[3]", "child.yaml:1: 'extends' takes a file"),
        (":x", "holds one spec"),
    ],
)
def test_extends_bad_value_is_named_with_its_line(write, value, words):
    write(child=f"extends: {value}\n")
    with pytest.raises(UsageError) as caught:
        load("child.yaml")
    assert words in str(caught.value)


def test_extends_without_kind_anywhere_says_kind_is_missing(write):
    write(base="x: {seed: 1}\n", child="extends: base.yaml\n")
    with pytest.raises(SpecError, match=r"kind: missing. The kinds are: control"):
        load("child.yaml")


# --- variables


VARIABLES = """\
kind: control
name: ppo_${env}_${n}
env: {id: "${env}", kwargs: {text: "a $${env} b", price: "5$", list: ["${n}"]}}
algorithm: {name: ppo, lr: "${lr}"}
train: {frames: "${frames}"}
"""


def test_variables_fill_strings_and_whole_scalars_get_types(write):
    write(v=VARIABLES)
    loaded = load("v.yaml", variables={"env": "Acrobot-v1", "n": "7", "lr": "3e-4", "frames": 1000})
    data = plain(loaded.spec)
    assert data["name"] == "ppo_Acrobot-v1_7"
    assert data["env"]["kwargs"] == {"text": "a ${env} b", "price": "5$", "list": [7]}
    assert data["algorithm"]["lr"] == 3e-4
    assert data["train"]["frames"] == 1000
    assert loaded.origin("env.id") == "-s env"
    assert loaded.origin("name") == "-s env, -s n"


def test_variables_with_a_default_need_no_value_and_take_one(write):
    write(v=VARIABLES.replace("${lr}", "${lr:1e-3}").replace("name: ppo_${env}_${n}", "name: ppo_${n:7}"))
    loaded = load("v.yaml", variables={"env": "Acrobot-v1", "frames": 1000})
    data = plain(loaded.spec)
    assert (data["name"], data["algorithm"]["lr"], data["env"]["kwargs"]["list"]) == ("ppo_7", 1e-3, [7])
    assert loaded.origin("algorithm.lr").startswith("v.yaml:")
    given = {"env": "Acrobot-v1", "frames": 1000, "lr": "3e-4", "n": "8"}
    data = plain(load("v.yaml", variables=given).spec)
    assert (data["name"], data["algorithm"]["lr"]) == ("ppo_8", 3e-4)


def test_variables_with_an_empty_default_are_null_alone_and_nothing_inside_text(write):
    text = VARIABLES.replace("ppo_${env}_${n}", "ppo${suffix:}").replace("${lr}", "${lr:}")
    write(v=text)
    given = {"env": "Acrobot-v1", "frames": 1000, "n": "7"}
    assert plain(load("v.yaml", variables={**given, "lr": "3e-4"}).spec)["name"] == "ppo"
    assert plain(load("v.yaml", variables={**given, "lr": "3e-4", "suffix": "_b"}).spec)["name"] == "ppo_b"
    with pytest.raises(UsageError, match=r"v\.yaml:4  algorithm\.lr: .* got null"):
        load("v.yaml", variables=given)


def test_variables_with_two_defaults_are_refused(write):
    given = {"env": "Acrobot-v1", "frames": 1000, "n": "7"}
    text = VARIABLES.replace("ppo_${env}_${n}", "ppo_${lr:1e-3}")
    write(v=text.replace("${lr}", "${lr:1e-3}"))
    assert plain(load("v.yaml", variables=given).spec)["algorithm"]["lr"] == 1e-3
    write(v=text.replace("${lr}", "${lr:2}"))
    with pytest.raises(UsageError, match=r"\$\{lr\} has two defaults in the spec, '1e-3' and '2'"):
        load("v.yaml", variables=given)


def test_variables_without_a_name_stay_text(write):
    write(v=VARIABLES.replace("ppo_${env}_${n}", "${:x}"))
    with pytest.raises(UsageError, match=r"name: .* got '\$\{:x\}'"):
        load("v.yaml", variables={"env": "Acrobot-v1", "frames": 1000, "n": "7", "lr": 1e-3})


def test_variables_unfilled_are_all_listed_with_their_lines(write):
    write(v=VARIABLES)
    with pytest.raises(UsageError) as caught:
        load("v.yaml", variables={"n": "7"})
    text = str(caught.value)
    assert "v.yaml:2 (-s n)  name: ${env}" in text
    assert "v.yaml:3  env.id: ${env}" in text
    assert "v.yaml:4  algorithm.lr: ${lr}" in text
    assert "v.yaml:5  train.frames: ${frames}" in text
    assert "-s env=... -s lr=... -s frames=..." in text
    assert caught.value.exit_code == 2


def test_variables_odd_name_is_a_variable_too(write):
    write(v=BODY + 'seed: "${first-seed}"\n')
    with pytest.raises(UsageError, match="-s first-seed"):
        load("v.yaml")
    assert load("v.yaml", variables={"first-seed": "3"}).spec.seed == 3


def test_variables_overridden_place_needs_no_value(write):
    write(v=BODY + 'seed: "${seed}"\n')
    assert load("v.yaml", overrides=["seed=3"]).spec.seed == 3


def test_variables_nobody_uses_are_refused_naming_the_nearest(write):
    write(v=VARIABLES, plain=BODY)
    given = {"env": "A", "n": 1, "lr": 1, "frames": 1}
    with pytest.raises(UsageError, match="Did you mean 'frames'"):
        load("v.yaml", variables=given | {"frame": 1})
    with pytest.raises(UsageError, match="Its variables are: none"):
        load("plain.yaml", variables={"x": 1})


def test_variables_wrong_value_names_line_and_flag(write):
    write(v=BODY + 'seed: "${seed}"\n')
    with pytest.raises(SpecError, match=r"v.yaml:5 \(-s seed\)  seed: expected a whole number of at least 0, got 'x'"):
        load("v.yaml", variables={"seed": "x"})
    with pytest.raises(UsageError, match=r"-s seed:1: not valid YAML"):
        load("v.yaml", variables={"seed": "[1"})


# --- overrides


def test_overrides_have_yaml_types_and_create_mappings():
    loaded = load(
        MINIMAL, overrides=["algorithm.lr=3e-4", "net.hidden=[32, 16]", "train.frames=4e6", "track.trace=false"]
    )
    data = plain(loaded.spec)
    assert data["algorithm"]["lr"] == 3e-4
    assert data["net"]["hidden"] == [32, 16]
    assert data["train"]["frames"] == 4_000_000
    assert data["track"]["trace"] is False
    assert loaded.origin("algorithm.lr") == "override"
    assert loaded.origin("net.hidden.1") == "override"
    assert loaded.origin("algorithm.name") == "python"


def test_overrides_reach_into_lists_and_later_ones_win():
    spec = load(MINIMAL | {"net": {"hidden": [1, 2]}}, overrides=["net.hidden.1=5", "seed=1", "seed=2"]).spec
    assert plain(spec)["net"]["hidden"] == [1, 5]
    assert spec.seed == 2


def test_overrides_mapping_takes_python_values():
    changed = {"algorithm": PPOSpec(name="ppo", epochs=2), "every.eval": Cadence(7, "steps"), "net.hidden": (3, 3)}
    data = plain(load(MINIMAL, overrides=changed).spec)
    assert data["algorithm"]["epochs"] == 2
    assert data["every"]["eval"] == "7 steps"
    assert data["net"]["hidden"] == [3, 3]


def test_overrides_empty_value_is_null():
    assert plain(load(MINIMAL, overrides=["every.eval="]).spec)["every"]["eval"] is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "expected path=value"),
        ("=3", "expected a dotted path"),
        ("a..b=3", "expected a dotted path"),
        ("seed.x=3", "'seed' is 1, not a mapping"),
        ("net.hidden.2=3", "'net.hidden' is a list of 2"),
        ("net.hidden.x=3", "'net.hidden' is a list of 2"),
        ("seed=[1", "override seed:1: not valid YAML"),
        ("algoritm.lr=3", "override  algoritm: unknown key. Did you mean 'algorithm'?"),
        ("algorithm.lr=x", "override  algorithm.lr: expected a number"),
    ],
)
def test_overrides_bad_one_is_named(override, words):
    with pytest.raises(UsageError) as caught:
        load(MINIMAL | {"seed": 1, "net": {"hidden": [1, 2]}}, overrides=[override])
    assert words in str(caught.value)


def test_load_leaves_its_arguments_alone():
    source = MINIMAL | {"net": {"hidden": [1, 2]}}
    load(source, overrides={"net.hidden.0": 9, "env.id": "B"})
    assert source == MINIMAL | {"net": {"hidden": [1, 2]}}


def test_dict_may_extend_a_file(write):
    write(cart=BODY)
    assert plain(load({"extends": "cart.yaml", "name": "y", "env": {"num_envs": 2}}).spec)["env"]["num_envs"] == 2
    with pytest.raises(UsageError, match="names no file"):
        load({"extends": ":x"})


# --- round trips


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["${x}", "$${x}", "1e4", "no"])
numbers = st.floats(0, 1e6, allow_nan=False)
schedules = numbers | st.builds(
    lambda shape, start, end: {"shape": shape, "start": start, "end": end},
    st.sampled_from(["linear", "cosine", "rate", "periodic"]),
    numbers,
    numbers,
)
specs = st.fixed_dictionaries(
    {
        "kind": st.just("control"),
        "name": st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True),
        "env": st.fixed_dictionaries(
            {
                "id": texts.filter(bool),
                "kwargs": st.dictionaries(texts, texts | st.integers() | numbers | st.booleans()),
            }
        ),
        "algorithm": st.fixed_dictionaries(
            {"name": st.just("ppo"), "lr": schedules, "gamma": st.floats(0, 1)},
            optional={"max_grad_norm": st.none(), "epochs": st.integers(1, 9)},
        ),
        "train": st.fixed_dictionaries({"frames": st.integers(1, 10**12)}),
    },
    optional={
        "every": st.fixed_dictionaries(
            {"checkpoint": st.lists(st.sampled_from(["0.5 hours", "1 step", "1e4 frames", "90 seconds"]))},
            optional={"eval": st.none(), "log": st.just("10 steps")},
        ),
        "hooks": st.just(["my.module:function"]),
    },
)


@given(specs)
def test_round_trip_through_yaml_gives_the_same_spec_and_hash(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    first = load(ControlSpec.model_validate(data))
    path.write_text(to_yaml(first.spec), encoding="utf-8")
    again = load(path)
    assert again.spec == first.spec
    assert spec_hash(again.spec) == spec_hash(first.spec)
    assert to_yaml(again.spec) == to_yaml(first.spec)


def test_loading_a_spec_object_gives_it_back():
    spec = load(MINIMAL).spec
    assert load(spec).spec == spec
    assert load(spec, overrides={"seed": 4}).spec.seed == 4


def test_to_yaml_holds_every_default():
    text = to_yaml(load(MINIMAL).spec)
    assert "gamma: 0.99" in text
    assert "checkpoint: [5 minutes]" in text


# --- what it needs


def test_import_and_load_need_neither_torch_nor_numpy():
    code = (
        "import sys; from palestra.spec.load import load; load('examples/control/ppo_cartpole.yaml');"
        "bad = {'torch', 'gymnasium', 'numpy', 'rich', 'typer', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
