"""Tests of datasets on the Hub."""
