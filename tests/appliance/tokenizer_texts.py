"""2,000 texts to tokenise, the same each time: words of many scripts, code, emoji, whitespace, control tokens."""

from __future__ import annotations

import random

_PIECES = (
    "The quick brown fox jumps over the lazy dog",
    "it's we'RE I'LL they'd YOU'VE 'tis don't",
    "Hello world HTTPServer parseJSONFile iPhone x86_64 McDonald's ÉCOLE Straße",
    "Grüße aus Köln ça va ¿Qué tal? Ångström naïve",
    "Привет, как дела? ДОБРЫЙ день",
    "Γειά σου Κόσμε ΑΒΓ",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナ ｆｕｌｌ",
    "안녕하세요 세계 \u1112\u1161\u11ab",
    "שלום עולם",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 ❤️ 👍🏽 🧑🏿‍🚀",
    "½ ² Ⅷ ① ㊿ ǅ ʰ ª",
    "e\u0301 n\u0303 a\u0308 \u0301x ﬁ",
    "1234567890 12 345 6.78e-9 2026-01-31 0x7F",
    "def f(x):\n    return x**2 + 1  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    '{"key": [1, 2.5, null, true], "é": "\\u00e9"}',
    '<div class="x">&nbsp;</div></table><h1>',
    "https://example.org/a_b?c=d&e=%20#f",
    "$€£¥₿ ±×÷≠≤≥∞∑∫√ !!!???...---",
    "//comment\r\n/* path/to/file */\r\n",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n",
    "\n  ",
    " " * 17,
    "\u00a0",
    "\u3000",
    "",
)
_CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<bos>",
    "<end_of_turn>",
    "<|user|>",
)
_BYTES = ("\x00", "\x07", "\u200b", "\ufeff", "\U0001f9ff", "\U00020000", "▁", "Ġ", "<0x0A>")


def texts(count: int = 2000) -> list[str]:
    draw = random.Random(2000)
    return [_text(draw) for _ in range(count)]


def _text(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.randint(1, 8)):
        words = draw.choice(_PIECES)
        match draw.randrange(10):
            case 0:
                parts.append(draw.choice(_CONTROL))
            case 1:
                parts.append(draw.choice(_BYTES))
            case 2:
                parts.append("".join(draw.choices("".join(_PIECES), k=draw.randint(1, 12))))
            case 3:
                parts.append(draw.choice(words) * draw.randint(1, 40))
            case 4:
                parts.append(words)
            case _:
                first = draw.randrange(len(words))
                parts.append(words[first : first + draw.randint(1, 20)])
        parts.append(draw.choice(_SPACES))
    return "".join(parts)
