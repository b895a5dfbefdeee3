"""Makes the Hugging Face fixtures under tests/data/models/hf: tiny random checkpoints as the
transformers library saves them, what it computes for them, and how it tokenizes some texts.

Run it again only to add a case; the files are committed, so tests need neither torch nor a network:

    python3 -m venv target/venv
    target/venv/bin/pip install torch transformers
    target/venv/bin/python tests/scripts/make_hf_fixtures.py

Per case: NAME/ (config, weights, where the case has one also a tokenizer and a chat template), and
NAME.json = {"sequences": [{"tokens", "positions", "logits"}], "texts": [{"text", "tokens"}],
"chat": {"messages", "text"}}. Logits are of float32 on the weights as stored.
"""

import json
import shutil
from pathlib import Path

import tokenizers
import torch
import transformers
from make_model_fixtures import SIZES, randomize

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "data" / "models" / "hf"
TEXTS = ["Once upon a time", " two  spaces\n\nand 1234 numbers", "naïve – 日本 🙂", "<|im_end|>x", ""]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer(vocab_size):
    """Byte-level BPE with Llama 3's way of cutting words, ChatML's specials, and BOS put first."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre.Sequence([
        pre.Split(tokenizers.Regex(words), "isolated"),
        pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()))
    tokenizer.train([str(ROOT / "tests" / "data" / "perplexity_text.txt")], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>",
        chat_template=TEMPLATE)


def sentence_piece_tokenizer(vocab_size):
    """What a converted Llama 2 tokenizer is: merges over `▁` words, bytes for what is unknown."""
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    normalizers = tokenizers.normalizers
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False, max_token_length=12)
    tokenizer.train([str(ROOT / "tests" / "data" / "perplexity_text.txt")], trainer)
    model = json.loads(tokenizer.to_str())
    model["added_tokens"] = [t for t in model["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(model))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        add_bos_token=False)


def cases():
    t = transformers
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    small = {**SIZES, "hidden_size": 32, "intermediate_size": 64}
    return {
        "llama": (t.LlamaForCausalLM(t.LlamaConfig(
            **{**small, "vocab_size": 323}, rope_parameters=llama3, bos_token_id=0,
            eos_token_id=[2, 1])), torch.bfloat16, "60KB", byte_level_tokenizer(323)),
        "qwen2": (t.Qwen2ForCausalLM(t.Qwen2Config(
            **{**small, "tie_word_embeddings": True},
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            torch.float16, "10MB", None),
        "qwen3": (t.Qwen3ForCausalLM(t.Qwen3Config(
            **{**small, "vocab_size": 423}, head_dim=16,
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 32})),
            torch.float32, "10MB", sentence_piece_tokenizer(423)),
    }


def make(name, model, dtype, shard_size, tokenizer):
    torch.manual_seed(sum(name.encode()))
    model = model.float().eval()
    randomize(model)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    # Read back, since the conversion has rounded the rotary frequencies as well.
    model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    n = model.config.vocab_size
    short = [3, n - 1, 3, 20, 0, 41, 41]
    long = [(7 * i * i + 13 * i + 5) % n for i in range(75)]
    result = {"sequences": [], "texts": []}
    for tokens, positions in (short, range(len(short))), (long, [0, 16, 63, 64, 74]):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, list(positions)]
        result["sequences"].append({
            "tokens": tokens, "positions": list(positions),
            "logits": [[round(x, 5) for x in row] for row in logits.tolist()]})
    if tokenizer:
        tokenizer.save_pretrained(folder)
        for text in TEXTS:
            result["texts"].append({"text": text, "tokens": tokenizer.encode(text)})
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": "Hello there"}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True)
            result["chat"] = {"messages": messages, "text": text}
    (OUT / f"{name}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(name, sorted((p.name, p.stat().st_size) for p in folder.iterdir()))


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        make(name, *case)
