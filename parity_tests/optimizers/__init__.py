EXCLUDED_CONDITIONS = ("inference_mode",)  # autocast is drawn: it does not change the functions' dtypes
