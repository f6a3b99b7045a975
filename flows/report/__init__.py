"""A run as one HTML file that works offline: curves, time, filters, samples with their tokens, lineage, verification.

| module | content |
|---|---|
| `build.py` | writing the file |
| `content.py` | the contents of the page, for a report and for the board |
| `data.py` | the report's data, read from the ledger, and the choice of samples that are shown with their tokens |
| `blocks.py` | columns, tokens and turns, packed for a browser |
| `facts.py` | tables and figures |
| `page.py` | the page, and which metrics are drawn together |
| `compare.py` | two runs side by side, as a paragraph and a page |

`assets/` contains the page's own template, style and scripts; `vendor/` the libraries that it includes, unchanged.
"""
