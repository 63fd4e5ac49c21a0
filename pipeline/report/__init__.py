"""The report of a tuned model: facts from its records, and the same facts as HTML, Markdown and JSON.

    source (an artifact, or what is about to become one) -> facts -> html | markdown | json

Nothing here measures, reads a clock or looks at the machine: equal artifacts have equal reports.
"""
