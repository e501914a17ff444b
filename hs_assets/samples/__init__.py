"""From rows to prompts, and from dumps to validated samples.

sources.py        files → rows, partitions, duplicates; source_index.py keeps them on disk
tables.py         our own Parquet files, replaced whole or not at all
files.py          which files a source is; text_rows.py and table_rows.py find and read their rows
conversations.py  what a row can be
formats.py        one row → a conversation, text or ids, or a reason to drop it, with row_json.py, messages.py and tools.py
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
filters.py        what a prompt must keep to
answers.py        a conversation → the same with the model's own answers; responses.py: those of a partition, and their table
prepare.py        rows of one partition → prompts
prompts.py        a partition of prompts and its table on disk
survey.py         what prompts are like: formats, drops, lengths, supervised share
readable.py       token ids → text as people look at it
show.py           all that is known of one row
page.py           a web page of some rows of a partition
model.py          facts of a checkpoint: layers, sizes, final norm, output head
eagle3.py         a dump → states that can be checked and stored
rules.py          what must hold for every sample
"""
