"""Texts that tokenizers and detokenizers find hard."""

CLEAN_TEXTS = (
    "What is the capital of France?",
    "  leading, trailing and   inner   spaces  ",
    "\n\nnew lines\r\n\ttabs\n",
    "numbers 0123456789 and 3.14159 and 1,000,000",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}  # comment",
    "Übergrößenträger, naïve façade, São Paulo",
    "combining: e\u0301 a\u0308 o\u0323\u0302 \u0e01\u0e33 \u1112\u1161\u11ab",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7 \u2764\ufe0f 1\ufe0f\u20e3",
    "\u2581 a typed low line \u2581\u2581 and \ufffd and \u00a0 and \u200b",
    "private \ue000 \uf8ff and \U00010348 gothic",
    "a" * 300,
    "<div class='x'>a < b && c > d</div> <| not a token |>",
    "it ends with a bracket <",
    "> it starts with one",
)
