"""What a model's files say of its tokenizer: stops, begin token, chat template; and the cache."""

from __future__ import annotations

import json
import os

import pytest

from palmette.errors import InvalidRequest, ModelFileError, UnsupportedFeature
from palmette.protocol import Message
from palmette.runtime.tokenization import load_tokenizer, source
from palmette.runtime.tokenization.prepared import PreparedCache, PreparedTokenizer
from tests.runtime.tokenization import tiny

BEGIN, END = 258, 259
WITH_BEGIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BEGIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT: list[Message] = [{"role": "user", "content": "hi"}]


def folder(tmp_path, vocabulary=None, **files):
    return tiny.write_folder(tmp_path / "model", vocabulary or tiny.byte_level(), **files)


def gguf(tmp_path, **more):
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.gguf_bytes(tiny.byte_level_gguf(**more)))
    return path


# What ends a generation


def test_the_stop_set_is_the_union_of_three_files(tmp_path):
    tokenizer = load_tokenizer(
        folder(
            tmp_path,
            tiny.byte_level(special=("<|begin|>", "<|turn_end|>")),
            config={"eos_token_id": 5},
            generation_config={"eos_token_id": [5, 6]},
            tokenizer_config={"eos_token": "<|turn_end|>"},
        )
    )
    assert tokenizer.stop_token_ids == {5, 6, 259}


def test_an_end_token_that_the_vocabulary_does_not_call_special_is_one_all_the_same(tmp_path):
    tokens = [tiny.added(258, "<|begin|>"), tiny.added(259, "<|turn_end|>", special=False)]
    path = folder(
        tmp_path,
        tiny.byte_level(added_tokens=tokens),
        tokenizer_config={"eos_token": {"content": "<|turn_end|>", "lstrip": False}},
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.stop_token_ids == {259}
    assert tokenizer.token_bytes(259) == b""
    assert 259 not in tokenizer.encode("<|turn_end|>")


def test_end_tokens_come_from_nested_configs_and_must_be_in_the_vocabulary(tmp_path):
    path = folder(tmp_path, config={"text_config": {"eos_token_id": [END, 99999]}})
    assert load_tokenizer(path).stop_token_ids == {END}


def test_an_end_token_that_is_no_id_is_refused(tmp_path):
    path = folder(tmp_path, config={"eos_token_id": "two"})
    with pytest.raises(ModelFileError, match=r"config.json: eos_token_id should be a token id"):
        load_tokenizer(path)


# What a prompt begins with


def add_bos(value):
    return {} if value is None else {"add_bos_token": value}


@pytest.mark.parametrize(
    ("adds", "template", "in_prompt", "in_chat"),
    [
        (True, WITHOUT_BEGIN, 1, 1),
        (True, WITH_BEGIN, 1, 1),
        (False, WITHOUT_BEGIN, 0, 0),
        (False, WITH_BEGIN, 0, 1),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_begin_token_comes_by_rule_or_template_but_never_twice(
    tmp_path, kind, adds, template, in_prompt, in_chat
):
    if kind == "folder":
        config = {"bos_token": "<|begin|>", "chat_template": template, "add_bos_token": adds}
        path, begin = folder(tmp_path, tokenizer_config=config), BEGIN
    else:
        options = {"tokenizer__ggml__add_bos_token": adds, "tokenizer__chat_template": template}
        path, begin = gguf(tmp_path, **options), 257
    tokenizer = load_tokenizer(path, home=tmp_path)
    assert tokenizer.prefix_ids == (begin,) * in_prompt
    token_ids = tokenizer.encode(tokenizer.chat_template.render(CHAT))
    assert token_ids[:1] == [begin] * in_chat or in_chat == 0
    assert token_ids.count(begin) == in_chat
    assert tokenizer.decode(token_ids).endswith("hi")


TEMPLATE_OF_FILE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BEGIN], "tokens": ["<|begin|>"]}},
}


@pytest.mark.parametrize(("adds", "wanted"), [(None, (BEGIN,)), (True, (BEGIN,)), (False, ())])
def test_where_the_config_is_silent_the_tokenizers_own_template_decides(tmp_path, adds, wanted):
    path = folder(
        tmp_path,
        tiny.byte_level(post_processor={"type": "Sequence", "processors": [TEMPLATE_OF_FILE]}),
        tokenizer_config={"bos_token": "<|begin|>", **add_bos(adds)},
    )
    assert load_tokenizer(path).prefix_ids == wanted


def test_a_gguf_file_that_is_silent_adds_no_begin_token_to_byte_level_prompts(tmp_path):
    assert load_tokenizer(gguf(tmp_path), home=tmp_path).prefix_ids == ()
    path = gguf(tmp_path, tokenizer__ggml__pre="llama-bpe")
    assert load_tokenizer(path, home=tmp_path).prefix_ids == (257,)


# The chat template


def test_a_model_without_a_template_works_but_does_not_chat(tmp_path):
    for path in (folder(tmp_path), gguf(tmp_path)):
        tokenizer = load_tokenizer(path, home=tmp_path)
        assert tokenizer.encode("hi") == [256]
        with pytest.raises(UnsupportedFeature, match="without a chat template; give one"):
            _ = tokenizer.chat_template
        tokenizer = load_tokenizer(path, chat_template=WITHOUT_BEGIN, home=tmp_path)
        assert tokenizer.chat_template.render(CHAT)[0].text == "hi"


SHARED = """\
{% for m in messages %}
{% if m.role != 'user' %}{{ raise_exception('only users, please') }}{% endif %}
{{ loop.index0 }}:{{ m.content | trim }}{{ eos_token -}}
{% endfor %}
"""


@pytest.mark.parametrize(
    "place", ["config", "list", "list of one", "file beside", "path", "text", "gguf"]
)
def test_every_source_of_a_template_renders_alike(tmp_path, place):
    config = {"eos_token": "<|end|>"}
    given = None
    if place == "config":
        config["chat_template"] = SHARED
    elif place == "list":
        named = [("tool_use", "{{ wrong }}"), ("default", SHARED)]
        config["chat_template"] = [{"name": n, "template": t} for n, t in named]
    elif place == "list of one":
        config["chat_template"] = [{"name": "chat", "template": SHARED}]
    path = folder(tmp_path, tokenizer_config=config)
    if place == "file beside":
        (path / "chat_template.jinja").write_text(SHARED)
    elif place == "path":
        given = tmp_path / "chatml"
        given.write_text(SHARED)
    elif place == "text":
        given = SHARED
    elif place == "gguf":
        path = gguf(tmp_path, tokenizer__chat_template=SHARED)
    chat = load_tokenizer(path, chat_template=given, home=tmp_path).chat_template
    text = "".join(piece.text for piece in chat.render([{"role": "user", "content": " hi "}]))
    assert text == "0:hi<|end|>"
    with pytest.raises(InvalidRequest, match="only users, please"):
        chat.render([{"role": "tool", "content": "x"}])


def test_the_given_template_wins_then_the_file_then_the_config(tmp_path):
    path = folder(tmp_path, tokenizer_config={"chat_template": "config"})
    assert load_tokenizer(path).chat_template.render(CHAT)[0].text == "config"
    (path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(path).chat_template.render(CHAT)[0].text == "file"
    chosen = load_tokenizer(path, chat_template="{{ 'given' }}").chat_template
    assert chosen.render(CHAT)[0].text == "given"


def test_a_path_that_is_not_there_is_not_taken_for_a_template(tmp_path):
    with pytest.raises(InvalidRequest, match="'chatml' is neither a readable file nor Jinja"):
        load_tokenizer(folder(tmp_path), chat_template="chatml")


def test_a_malformed_template_shows_only_where_somebody_chats(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path, tokenizer_config={"chat_template": "{% if %}"}))
    assert tokenizer.encode("hi") == [256]
    with pytest.raises(InvalidRequest, match="malformed"):
        _ = tokenizer.chat_template


# Damaged files


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json: is not JSON"),
        ("tokenizer_config.json", "[]", "should hold an object, holds a list"),
        ("tokenizer.json", "{}", "has no model"),
        ("tokenizer_config.json", '{"chat_template": 5}', "neither a text nor a list"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, words):
    path = folder(tmp_path)
    (path / name).write_text(content)
    with pytest.raises(ModelFileError, match=words):
        load_tokenizer(path)


def test_a_vocabulary_that_cannot_be_read_is_named(tmp_path):
    vocabulary = tiny.byte_level()
    vocabulary["model"]["merges"] = [["no", "such"]]
    with pytest.raises(ModelFileError, match=r"tokenizer.json: .*out of vocabulary"):
        load_tokenizer(folder(tmp_path, vocabulary))


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"no tokenizer.json, tokenizer.model or vocab.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="no such file or folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="holds no tokenizer"):
        load_tokenizer(gguf(tmp_path, tokenizer__ggml__model=None), home=tmp_path)


def test_a_gguf_tokenizer_that_transformers_does_not_read_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="the tokenizer cannot be converted"):
        load_tokenizer(gguf(tmp_path, general__architecture="unheard-of"), home=tmp_path)


# Vocabularies that are converted, and the cache


def test_control_tokens_of_a_gguf_file_are_those_it_marks(tmp_path):
    tokenizer = load_tokenizer(
        gguf(tmp_path, tokenizer__ggml__token_type=[1] * 256 + [3, 1, 4]), home=tmp_path
    )
    # 257 and 258 are named as begin and end; 256 is marked as a control token.
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert tokenizer.stop_token_ids == {258}


def test_an_ordinary_token_named_for_padding_stays_ordinary(tmp_path):
    tokenizer = load_tokenizer(gguf(tmp_path, tokenizer__ggml__padding_token_id=33), home=tmp_path)
    assert tokenizer.encode("hi!") == [256, 33]


def test_a_begin_token_that_the_vocabulary_lacks_is_not_written_as_text(tmp_path):
    config = {"bos_token": "<nowhere>", "add_bos_token": True, "chat_template": WITHOUT_BEGIN}
    tokenizer = load_tokenizer(folder(tmp_path, tokenizer_config=config))
    assert tokenizer.prefix_ids == ()
    assert tokenizer.encode(tokenizer.chat_template.render(CHAT)) == [256]


def test_all_end_tokens_of_a_gguf_file_stop(tmp_path):
    path = gguf(tmp_path, tokenizer__ggml__eot_token_id=257, tokenizer__ggml__eom_token_id=256)
    assert load_tokenizer(path, home=tmp_path).stop_token_ids == {256, 257, 258}


def test_the_older_files_of_a_folder_are_converted(tmp_path):
    vocabulary = tiny.byte_level()
    path = folder(
        tmp_path,
        vocabulary,
        vocab=vocabulary["model"]["vocab"] | {"<|end|>": 258},
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"},
        config={"model_type": "gpt2"},
    )
    (path / "tokenizer.json").unlink()
    (path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    tokenizer = load_tokenizer(path, home=tmp_path)
    assert tokenizer.encode("hi hi") == [256, 257]
    assert tokenizer.stop_token_ids == {258}


def count_conversions(monkeypatch):
    made = []
    convert = source._through_transformers

    def counted(*args, **options):
        made.append(args)
        return convert(*args, **options)

    monkeypatch.setattr(source, "_through_transformers", counted)
    return made


def test_a_converted_vocabulary_is_kept_and_found_again(tmp_path, monkeypatch):
    made = count_conversions(monkeypatch)
    path = gguf(tmp_path)
    first = load_tokenizer(path, home=tmp_path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    for again in (load_tokenizer(path, home=tmp_path), load_tokenizer(copy, home=tmp_path)):
        assert again.encode("hi <|end|> é") == first.encode("hi <|end|> é")
        assert again.all_token_bytes() == first.all_token_bytes()
        assert again.special_token_ids == first.special_token_ids
    assert len(made) == 1


def test_another_vocabulary_at_the_same_path_is_converted_anew(tmp_path, monkeypatch):
    made = count_conversions(monkeypatch)
    path = gguf(tmp_path)
    stamp = path.stat()
    load_tokenizer(path, home=tmp_path)
    tokens = tiny.byte_level_gguf()["tokenizer.ggml.tokens"]
    tokens[256] = "ho"
    gguf(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=["h o"])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size
    assert load_tokenizer(path, home=tmp_path).token_bytes(256) == b"ho"
    assert len(made) == 2


PREPARED = PreparedTokenizer(
    tokenizer="{}", kind="byte_level", adds_bos=False, normalizes=False, special={7: "<x>"}
)


def damage_cut(entry):
    entry.write_bytes(entry.read_bytes()[:-5])


def damage_flip(entry):
    content = bytearray(entry.read_bytes())
    content[-3] ^= 1
    entry.write_bytes(content)


def damage_empty(entry):
    entry.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty])
def test_a_damaged_cache_entry_is_made_anew(tmp_path, damage):
    cache = PreparedCache(tmp_path)
    assert cache.get("key", lambda: PREPARED) == PREPARED
    assert cache.get("key", lambda: pytest.fail("was cached")) == PREPARED
    (entry,) = tmp_path.iterdir()
    damage(entry)
    made = []
    assert cache.get("key", lambda: made.append(1) or PREPARED) == PREPARED
    assert made == [1]
    assert cache.get("key", lambda: pytest.fail("was cached")) == PREPARED


def test_entries_of_different_keys_are_different(tmp_path):
    cache = PreparedCache(tmp_path)
    cache.get("one", lambda: PREPARED)
    made = []
    cache.get("two", lambda: made.append(1) or PREPARED)
    assert made == [1]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PreparedCache(tmp_path / "file" / "tokenizers")
    assert cache.get("key", lambda: PREPARED) == PREPARED


def test_a_conversion_that_fails_leaves_no_entry(tmp_path):
    cache = PreparedCache(tmp_path / "tokenizers")
    with pytest.raises(ModelFileError):
        cache.get("key", lambda: (_ for _ in ()).throw(ModelFileError("x", "y")))
    assert not (tmp_path / "tokenizers").exists()


def test_entries_hold_json_and_nothing_else(tmp_path):
    PreparedCache(tmp_path).get("key", lambda: PREPARED)
    (entry,) = tmp_path.iterdir()
    body = json.loads(entry.read_bytes().partition(b"\n")[2])
    assert set(body) == {"tokenizer", "kind", "adds_bos", "normalizes", "special"}
