"""From rows to prompts, and from dumps to validated samples.

sources.py        a JSONL file → rows, partitions, duplicates
conversations.py  one row → messages, or a reason to drop it
tokenizer.py      the model's tokenizer and chat template, with their hashes
masks.py          messages → text and the spans that are supervised → token ids and loss mask
answers.py        a conversation → the same with the model's own answers
responses.py      one partition of them, and its table on disk
prompts.py        one partition: rows → prompts; its table on disk
pieces.py         token ids → text as people look at it
show.py           all that is known of one row
page.py           a web page of some rows of a partition
model.py          facts of a checkpoint: layers, sizes, final norm, output head
eagle3.py         a dump → states that can be checked and stored
rules.py          what must hold for every sample
"""
