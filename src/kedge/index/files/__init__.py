"""The index as readable files beside a journal."""
