"""Tables in, Plotly figures out; no Streamlit here."""
