# Usage: run.sh URL
set -eu
! python -m unittest -q check_calc 2>/dev/null
echo "before: the test fails"
git init -q . && git add . && git -c user.name=x -c user.email=x@x commit -q -m "a mistake"
mini --yolo --exit-immediately -m openai/nano -t "The test in check_calc.py fails. Mend calc.py." \
  -c config.yaml -c model.model_kwargs.api_base="$1/v1" -o trajectory.json
git diff --unified=0 calc.py
python -m unittest -q check_calc 2>/dev/null
echo "after: the test passes"
