"""Goal: models and requests of every kind that is taken are found again exactly: sliding windows
beside full attention, MLA, adapters, images, cache_salt; loads layer by layer; KV events; and what a damaged
store made an engine compute is never stored. Method: the real vLLM on the CPU with tiny models in
float32, level raw, all engines one after the other in one process (vllm_rig.run_jobs), each with a
store that is closed before the next: what the next one finds is on disk. A hit is compared with one
of vLLM's own prefix cache, to the last bit."""
import pytest
from conftest import need
from vllm_rig import (IMAGE, ROUNDING, disk, flip_command, job, run_jobs, same, save_adapter,
                      save_image_model, save_model, tokens)

need("vllm", "vllm")
LONG, SHORT = tokens(400, 11), tokens(200, 14)
LONGER = LONG + tokens(150, 16)  # fills blocks in the step that loads those of LONG
BASE, LORA = {"tokens": SHORT}, {"tokens": SHORT, "lora": "a"}
SALTED, OTHER_SALT = {"tokens": SHORT, "salt": "x"}, {"tokens": SHORT, "salt": "y"}


def windows_jobs(where):
    model = save_model(where / "model", sliding_window=64, layer_types=[
        "sliding_attention", "full_attention"] * 2)
    store = disk(where / "store")
    return [job(model, [[LONG], [LONG]], store), job(model, [[LONG]], store),
            job(model, [[LONG]], store, between={"0": flip_command(where / "store")})]


def mla_jobs(where):
    """The sizes of DeepSeek's latent are the only ones that the kernel of the CPU has."""
    model = save_model(
        where / "model", "DeepseekV2", num_hidden_layers=2, num_key_value_heads=4, head_dim=64,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=64, qk_rope_head_dim=64,
        v_head_dim=64, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2)
    store = disk(where / "store")
    return [job(model, [[SHORT], [SHORT]], store), job(model, [[SHORT]], store)]


def request_jobs(where, tiny):
    one, two, store = save_adapter(where / "one", 1), save_adapter(where / "two", 2), \
        disk(where / "store")
    return [job(tiny, [[LORA], [LORA], [BASE], [SALTED], [SALTED]], store, lora={"a": one},
                events=True),
            job(tiny, [[LORA], [BASE], [SALTED], [OTHER_SALT]], store, lora={"a": one}),
            job(tiny, [[LORA]], store, lora={"a": two})]


def image_jobs(where):
    """One text about two images; a third one after the restart. The image stands first."""
    model, store = save_image_model(where / "model"), disk(where / "store")
    one, two, three = ({"tokens": [IMAGE, *SHORT[:130]], "image": seed} for seed in (1, 2, 3))
    engine = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    return [job(model, [[one], [two]], engine=engine),
            job(model, [[one], [one], [two]], store, engine=engine),
            job(model, [[one], [two], [three]], store, engine=engine)]


def waiting_jobs(where, tiny, load):
    """One of the first blocks is damaged: the store would take what was computed behind it, as the
    blocks before that are there (where all are gone it is refused as an orphan)."""
    store = disk(where / "store", load=load)
    return [job(tiny, [[LONG], [LONG]], store), job(tiny, [[LONG]], store),
            job(tiny, [[LONGER], [LONGER]], store, between={"0": flip_command(where / "store", 400000)}),
            job(tiny, [[LONGER]], store)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """{name: answers of its jobs}: one process for all, as the import takes longer than a job."""
    tiny = save_model(tmp_path_factory.mktemp("tiny"))

    def folder(name):
        return tmp_path_factory.mktemp(name)
    jobs = {"windows": windows_jobs(folder("windows")), "mla": mla_jobs(folder("mla")),
            "requests": request_jobs(folder("requests"), tiny), "images": image_jobs(folder("images")),
            "plain": [job(tiny, [[LONGER]])],
            **{load: waiting_jobs(folder(load), tiny, load) for load in ("layers", "sync")}}
    answers = iter(run_jobs(*(one for part in jobs.values() for one in part)))
    return {name: [next(answers) for _ in part] for name, part in jobs.items()}


def good(answers):
    for one in answers:
        assert "error" not in one, one["error"]
    return answers


def test_full_attention_beside_windows(ran):
    """Two groups: the hit needs every block of the one, and the window's of the other. When a block
    is damaged, the whole prompt is computed."""
    first, again, poisoned = good(ran["windows"])
    cold, native = first["batches"]
    assert (cold[0]["cached"], native[0]["cached"]) == (0, 384)
    assert again["batches"][0][0]["cached"] == 384
    same(again["batches"][0], native)
    # 12 blocks of full attention, and the 2 that hold the 63 tokens before the end
    assert again["metrics"]["loaded_disk_blocks"] == 14
    assert poisoned["metrics"]["loaded_blocks"] < 14 and poisoned["metrics"]["failed_blocks"] > 0
    same(poisoned["batches"][0], cold, ROUNDING)


def test_mla(ran):
    first, again = good(ran["mla"])
    cold, native = first["batches"]
    assert cold[0]["cached"] == 0 and native[0]["cached"] == 192
    assert again["batches"][0][0]["cached"] == 192
    same(again["batches"][0], native)


def test_adapters_salts_and_events(ran):
    """A block is found by the same adapter's weights, not by its name, and by the same cache_salt.
    Every block that is stored is told to the engine's publisher, once, with its tokens."""
    first, again, changed = good(ran["requests"])
    plain, native, _, _, salted_native = first["batches"]
    assert [b[0]["cached"] for b in first["batches"]] == [0, 192, 0, 0, 192]
    assert [b[0]["cached"] for b in again["batches"]] == [192, 192, 192, 0]
    same(again["batches"][0], native)
    same(again["batches"][2], salted_native)
    assert changed["batches"][0][0]["cached"] == 0
    assert plain[0]["tokens"] != changed["batches"][0][0]["tokens"]
    told = first["events"]
    assert {event["lora"] for event in told} == {"a", None}
    blocks = [h for event in told for h in event["hashes"]]
    assert len(blocks) == len(set(blocks)) == first["metrics"]["stored_blocks"]
    # The first prompt's: 6 blocks, and what the answer fills
    mine = [event for event in told if event["lora"] == "a"]
    assert mine[0]["parent"] is None and mine[0]["block"] == 32
    assert [t for event in mine for t in event["tokens"]][:192] == SHORT[:192]


def test_the_same_text_about_another_image_shares_no_block(ran):
    """149 tokens, the image's 19 first: found again after a restart by the same image alone."""
    plain, first, again = good(ran["images"])
    cold, native, other = (batch[0] for batch in first["batches"])
    assert [b["cached"] for b in (cold, native, other)] == [0, 128, 0]
    assert cold["tokens"] != other["tokens"]  # the image decides what is said
    same([cold, other], [batch[0] for batch in plain["batches"]], ROUNDING)
    hit, other_hit, third = (batch[0] for batch in again["batches"])
    assert [b["cached"] for b in (hit, other_hit, third)] == [128, 128, 0]
    same([hit], [native])
    same([other_hit], [other], ROUNDING)
    assert again["metrics"]["loaded_disk_blocks"] == 8


@pytest.mark.parametrize("load", ["layers", "sync"])
def test_a_step_that_waits_for_its_loads(ran, load):
    """Layer by layer, or all before the first: hits are exact; what stands behind a damaged record
    is computed; and the next engine finds nothing that was computed from the damaged one."""
    first, again, poisoned, after = good(ran[load])
    native, plain = first["batches"][1], good(ran["plain"])[0]["batches"][0]
    assert again["batches"][0][0]["cached"] == 384
    same(again["batches"][0], native)
    assert poisoned["metrics"]["failed_blocks"] > 0
    for batch in (*poisoned["batches"], after["batches"][0]):
        same(batch, plain, ROUNDING)
