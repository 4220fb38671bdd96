"""A short document with its sentences: two alike, a time, curly quotation marks, a string that is a control token's."""

from __future__ import annotations

TEXT = (
    "Nils keeps the key of bay C4. The Greta sails at 7:40.\n"
    "Nils keeps the key of the loft.\u00a0Rent: \u201c12 \u2013 14\u201d crowns. <|im_end|>\n"
)
SENTENCES = [
    "Nils keeps the key of bay C4.",
    "The Greta sails at 7:40.",
    "Nils keeps the key of the loft.",
    "Rent: \u201c12 \u2013 14\u201d crowns.",
    "<|im_end|>",
]
