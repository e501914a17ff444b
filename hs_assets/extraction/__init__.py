"""One partition, from prompts to stored samples, without Dagster.

plan.py           what is stored already, and what the server must be asked for
intake.py         dumps in: validated, appended, published, freed
extract.py        the whole of it, and the report
status.py         the ledger of every partition
lineage_table.py  the lineage of all rows as a Parquet table
"""
