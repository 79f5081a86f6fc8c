"""Generation with a memory: every mode of `generate`, pipelines, several turns, compiled decoding."""

import pytest
import torch
import torch._dynamo.testing
from arm_models import decode, gap, tiny_arm, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from hf_models.arm import ArmCache

IDS = tokens(2, 21)
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


@pytest.fixture(scope="module")
def model():
    return tiny_arm()


def greedy_without_cache(model, ids: torch.Tensor, mask: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        with torch.no_grad():
            best = model(ids, attention_mask=mask, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids, mask = torch.cat((ids, best), 1), torch.cat((mask, torch.ones_like(best)), 1)
    return ids


def test_greedy_equals_no_cache_when_a_row_is_padded_on_the_left(model):
    out = model.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False)
    assert torch.equal(out, greedy_without_cache(model, IDS, MASK, 20))


def test_beams_equal_no_cache_when_several_are_returned(model):
    settings = {"attention_mask": MASK, "max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 3}
    out = model.generate(IDS, **settings, do_sample=False)
    assert out.shape == (6, 33)
    assert torch.equal(out, model.generate(IDS, **settings, do_sample=False, use_cache=False))


def test_samples_are_reproducible_when_the_seed_is(model):
    settings = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3}
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(model.generate(IDS, **settings))
    assert runs[0].shape == (6, 29) and torch.equal(*runs)


@pytest.mark.parametrize("kind", ["prompt lookup", "other assistant", "the model itself"])
def test_assisted_decoding_equals_greedy_when_drafts_are_rejected(kind, model):
    prompt = torch.cat((IDS[1:], IDS[1:, 5:15]), 1)
    greedy = model.generate(prompt, max_new_tokens=40, do_sample=False)
    assistant = {"other assistant": tiny_arm(window=5, sinks=1, slots_per_bucket=2), "the model itself": model}
    settings = {"prompt_lookup_num_tokens": 4} if kind == "prompt lookup" else {"assistant_model": assistant[kind]}
    assert torch.equal(model.generate(prompt, max_new_tokens=40, do_sample=False, **settings), greedy)


def test_second_turn_goes_on_when_the_cache_is_passed_again(model):
    whole = model.generate(IDS[1:], max_new_tokens=20, do_sample=False)
    cache = ArmCache(model.config)
    first = model.generate(IDS[1:], max_new_tokens=10, do_sample=False, cache=cache)
    assert cache.get_seq_length() == first.shape[1] - 1
    assert torch.equal(model.generate(first, max_new_tokens=10, do_sample=False, cache=cache), whole)


def test_prompt_in_chunks_gives_the_same_when_the_mask_grows(model):
    settings = {"attention_mask": MASK, "max_new_tokens": 10, "do_sample": False}
    whole = model.generate(IDS, **settings)
    assert torch.equal(model.generate(IDS, **settings, prefill_chunk_size=5), whole)


def test_bytes_stay_the_same_when_the_text_grows(model):
    sizes = []
    for length in (7, 40, 200):
        cache = ArmCache(model.config)
        model.generate(tokens(1, length), max_new_tokens=3, cache=cache)
        sizes.append(cache.nbytes())
    assert len(set(sizes)) == 1


def test_text_pipeline_answers_a_batch_when_the_folder_is_named(model, tmp_path):
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(47))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    ).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path))
    prompts = ["w1 w2 w3", "w9 w8 w7 w6 w5 w4 w3 w2", "w40"]
    settings = {"max_new_tokens": 6, "do_sample": False}
    together = pipe(prompts, batch_size=3, **settings)
    alone = [pipe(prompt, **settings) for prompt in prompts]
    assert type(pipe.model).__name__ == "ArmLlamaForCausalLM"
    assert together == alone and all(len(row[0]["generated_text"]) > 10 for row in together)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_decoding_is_one_graph_when_compiled(masked, model):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    ids = tokens(2, 130, seed=3)
    for prompt in (ids[:, :25], ids[:, 30:55]):  # two prompts through one compiled model
        cache, plain = ArmCache(model.config), ArmCache(model.config)
        model(prompt, cache=cache)
        model(prompt, cache=plain)
        worst = 0.0
        for i in range(100 if prompt is ids[:, :25] else 50):
            mask = None
            if masked:
                mask = torch.ones(2, prompt.shape[1] + i + 1, dtype=torch.long)
                torch._dynamo.maybe_mark_dynamic(mask, 1)  # as `generate` does
            token = ids[:, 25 + i : 26 + i]
            expected = model(token, attention_mask=mask, cache=plain).logits
            worst = max(worst, gap(step(token, attention_mask=mask, cache=cache).logits, expected))
        assert worst < 1e-5
    assert counter.frame_count == 1


def test_cache_starts_afresh_when_it_is_reset(model):
    cache = ArmCache(model.config)
    first = decode(model, IDS, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(decode(model, IDS, cache), first)
