"""One partition, from rows to stored samples, without Dagster.

respond.py        rows answered by the target model itself
generations.py    what it generated, turn by turn
plan.py           what is stored already, and what the server must be asked for
preflight.py      what extracting them would take, before anything is asked for
backfill_room.py  the same for a whole backfill, once
intake.py         dumps in: validated, appended, published, freed
extract.py        the whole of it, and the report
progress.py       how far a long work is
status.py         the ledger of every partition
last_failure.py   why the last run of a partition failed
lineage_table.py  the lineage of all rows as a Parquet table
remove.py         partitions that are not wanted any more
tidy.py           what crashes left, removed
backfill_summary.py  a page on a finished backfill
"""
