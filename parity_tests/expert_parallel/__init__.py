EXCLUDED_CONDITIONS = ("inference_mode",)  # autocast is drawn: it does not change the functions' dtypes
WIDE_OUTPUTS = False  # unless a scheme or its file says otherwise
