"""A run as one file to read: curves, time, filters, samples with their tokens, lineage, verification. Works offline.

| module | makes |
|---|---|
| `data.py` | what the report tells, read from the ledger |
| `choice.py` | which samples are shown with their tokens |
| `tokens.py` | those samples' tokens, their texts and what is known of each |
| `blocks.py` | columns, packed for a browser |
| `panels.py` | which metrics are drawn together |
| `page.py` | the page |
| `curve.py` | the reward curve alone, as a picture |

`assets/` is the page's own template, style and scripts; `vendor/` the libraries that it brings along, unchanged.
"""
