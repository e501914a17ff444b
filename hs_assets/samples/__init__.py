"""From rows to prompts, and from dumps to validated samples.

sources.py        a JSONL file → rows, partitions, duplicates
conversations.py  one row → messages, or a reason to drop it
tokenizer.py      the model's tokenizer and chat template, with their hashes
template.py       a chat template: a conversation → text
pieces.py         where each piece of a conversation stands in that text
views.py          a conversation as rendered, and its beginnings
openings.py       where an assistant's turn begins
stops.py          where it ends
turns.py          where each turn stands, and whether a later one changed it
generated.py      a turn as the model generated it, where the template never renders it that way
marks.py          what a template says itself of what was generated
masks.py          a conversation → texts and the spans that are supervised
encoding.py       texts and spans → token ids and loss masks
prompts.py        one partition: rows → prompts; its table on disk
model.py          facts of a checkpoint: layers, sizes, final norm, output head
eagle3.py         a dump → states that can be checked and stored
rules.py          what must hold for every sample
"""
