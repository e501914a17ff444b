"""The contract between the server and the pipeline: names, records and the layout of a dump (see README.md beside this).

Standard library only, so that it can be imported inside SGLang's processes.
"""
